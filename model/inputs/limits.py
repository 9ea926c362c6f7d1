"""Size limits for the files of a checkpoint. Each limit is several times the size in published models."""

from __future__ import annotations

MAX_JSON_BYTES = 16 << 20  # up to twenty times as much as Python objects
MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 256 << 10  # Jinja compiles about 100 KiB a second
MAX_VOCAB_SIZE = 1 << 24
