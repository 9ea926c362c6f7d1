"""The forward pass: Llama, its layers, the matrix products for CPUs, rotary embeddings, and sharding.

It imports `model.config`, `quantization`, jax and flax. Attention is a callable argument, so the network knows nothing
of pages, batches, files or sampling.
"""
