"""Weights in fewer bits: the forms in which they are stored, and how values become those forms.

`eight_bit` knows jax; `forms` and `checkpoint_form` know `model.inputs` only, so that a config is read without jax. How
a form is multiplied is the network's affair, and how files are read is `loading`'s.
"""
