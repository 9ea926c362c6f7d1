"""XLA's options, programs compiled in threads while weights are loaded, and the cache on disk.

Knows jax only: nothing of the model.
"""
