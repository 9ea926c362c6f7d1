"""Finds tool calls in the model's growing text, in the formats of Llama 3 and of its fine-tunes.

`parser` is the formats' common part, `json_calls` and `pythonic_calls` are the formats, `formats` has their names.
`literals` turns the arguments of all formats into JSON.
"""
