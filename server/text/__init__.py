"""Text and token ids: tokenizer, chat template, masks for users' text, stop strings, streamed text, tool calls.

The package uses tokenizers, Jinja, `transformers` and `model.inputs`. It does not depend on HTTP, requests or the
engine.
"""
