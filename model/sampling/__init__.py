"""From logits to tokens and log-probabilities, each chip on its own part of the vocabulary.

It imports jax, the layout of the batcher's slots, and `model.network.sharding`.
"""
