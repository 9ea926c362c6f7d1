"""The forward pass: Llama, its layers, the products of a CPU, rotary embeddings, and which chip holds what.

Knows `model.config`, `quantization`, jax and flax. It takes attention as a callable: nothing of pages, batches, files
or sampling.
"""
