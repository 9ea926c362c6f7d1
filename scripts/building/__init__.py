"""From settings to a running engine: the device, the weights, the memory, the step's shapes and the tokenizer.

It imports `flags`, `model`, `batcher` and `server`, and no other package of `scripts`.
"""
