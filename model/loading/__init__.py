"""Where a model comes from, and its weights: Hugging Face's form, ours (Orbax), and random ones.

Knows the network, `quantization`, the config and `model.inputs`. Nothing here runs once the server has started.
"""
