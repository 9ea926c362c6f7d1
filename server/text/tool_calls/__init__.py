"""Tool calls in what the model writes: found while the text grows, in the formats of Llama 3.

`parser` is what the formats share, `json_calls` and `pythonic_calls` are the formats, `formats` names them.
"""
