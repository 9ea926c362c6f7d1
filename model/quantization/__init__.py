"""Quantised weights: the forms in which they are stored, and the conversion to these forms.

`eight_bit` knows jax. `forms` and `checkpoint_form` know `model.inputs` only: a config is read without jax. The network
multiplies quantised kernels; `loading` reads the files.
"""
