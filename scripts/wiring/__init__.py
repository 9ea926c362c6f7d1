"""From flags to an engine: settings, the model and its memory, the step's shapes, a tokenizer, and errors in one line.

Knows `model`, `batcher` and `server`, and no other room of `scripts`.
"""
