"""Finds tool calls in the model's growing text, in the formats of Llama 3.

`parser` is the formats' common part, `json_calls` and `pythonic_calls` are the formats, `formats` has their names.
"""
