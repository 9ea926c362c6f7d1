"""Weights in fewer bits: the forms in which they are stored, and how values become those forms.

Knows jax only. How a form is multiplied is the network's, which checkpoint holds which form is `loading`'s.
"""
