"""Ragged paged attention: one operation, a reference in plain jnp, and our own kernels for TPUs and NVIDIA GPUs."""
