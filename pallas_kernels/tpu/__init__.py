"""Ragged paged attention for TPUs (Pallas on Mosaic)."""
