"""XLA's options, programs compiled in threads while weights are loaded, and the programs on disk.

It imports jax and `model.inputs` only and knows nothing of the model.
"""
