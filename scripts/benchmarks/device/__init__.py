"""Timings and checks of the attention kernels on the attached GPU, compared with other implementations."""
