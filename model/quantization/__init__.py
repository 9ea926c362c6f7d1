"""The forms of quantised weights, and what checkpoints say of theirs.

`unpack` imports numpy. `forms` and `checkpoint_form` import `model.inputs` only, so that a config is read without jax.
The network multiplies quantised kernels; `loading` reads the files.
"""
