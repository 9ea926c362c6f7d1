"""From flags to an engine: settings, the model and its memory, the step's shapes, a tokenizer, and error reports.

It imports `model`, `batcher` and `server`, and no other package of `scripts`.
"""
