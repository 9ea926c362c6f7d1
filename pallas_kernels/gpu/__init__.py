"""Ragged paged attention for NVIDIA GPUs, from Ampere to Blackwell, in Pallas on Mosaic GPU."""
