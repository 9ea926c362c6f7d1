"""Text and token ids: tokenizer, chat template, masking of what users write, stop strings, the growing text.

Knows tokenizers, Jinja, `transformers` and `model.inputs`. It knows nothing of HTTP, requests or the engine.
"""
