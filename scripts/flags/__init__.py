"""From the command line to settings: the flags of the commands, their files and their errors. It has no jax."""
