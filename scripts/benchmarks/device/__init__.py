"""Timings and checks of the attention kernels on the attached GPU, next to what jax ships."""
