"""Llama 3 in Flax NNX, from a checkpoint's files to the tokens of a step.

The packages, from the top: `execution` runs steps; `loading`, `sampling` and `compiling` do not import each other;
`network` is the forward pass; `quantization` has the forms of quantised weights; `config.py` holds a model's constants
and `presets.py` those of the published models; `inputs` reads files and checks them. `demo` is the embedded checkpoint.
"""
