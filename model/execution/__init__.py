"""The compiled step, the runner that executes the batcher's steps, and the memory that they need.

Knows the network, sampling, compiling, the kernels' operation, and `batcher.step`; nothing of files.
"""
