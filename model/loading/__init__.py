"""Finds a model and loads its weights: from Hugging Face files, from our Orbax files, or random ones.

It imports the network, `quantization`, the config and `model.inputs`. After the server has started, only LoRA adapters
are read.
"""
