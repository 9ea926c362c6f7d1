"""Text and token ids: tokenizer, chat template, masks for users' text, stop strings, streamed text, tool calls.

The package uses tokenizers, Jinja, `transformers` and `model.inputs`, but no HTTP, no requests and no engine.
"""
