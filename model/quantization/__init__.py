"""Quantised weights: the forms in which they are stored, and the conversion to these forms.

`eight_bit` imports jax. `forms` and `checkpoint_form` import `model.inputs` only, so that a config is read without jax.
The network multiplies quantised kernels; `loading` reads the files.
"""
