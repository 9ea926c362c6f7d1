"""Finds a model and loads its weights: from Hugging Face files, from our Orbax files, or random ones.

It imports the network, `quantization`, the config and `model.inputs`. Nothing here runs after the server has started.
"""
