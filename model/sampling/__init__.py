"""From logits to tokens and log-probabilities, each chip on its own part of the vocabulary.

Knows jax, the slots of `batcher.step`, and of the network how it is split over chips.
"""
