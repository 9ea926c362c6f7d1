"""Builds a running engine from settings: the device, the weights, the memory, the step's shapes and the tokenizer.

The package imports `flags`, `model`, `batcher` and `server`, and no other package of `scripts`.
"""
