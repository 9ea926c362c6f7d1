"""The operation on CPUs, in C: its sources, their compilation on the machine that runs them, and the backend."""
