"""How large the files of a checkpoint may be. Each limit is several times what published models have."""

from __future__ import annotations

MAX_JSON_BYTES = 16 << 20  # as Python objects up to twenty times that
MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 256 << 10  # Jinja compiles about 100 KiB a second
MAX_VOCAB_SIZE = 1 << 24
