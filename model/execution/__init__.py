"""The compiled step, the runner that executes the batcher's steps, and the memory plan.

It imports the network, sampling, compiling, the API of the kernels, and `batcher.step`. It reads no files.
"""
