"""The small files of a model's folder, made of the metadata of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.inputs.gguf import GgufFile
from model.loading.gguf_config import hf_config
from server.text.gguf_tokenizer import read_gguf_tokenizer


def small_files(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The content of `config.json`, and the tokenizer's files by name. ValueError if the metadata cannot be used."""
    tokenizer = read_gguf_tokenizer(path)
    template = tokenizer.chat_templates.for_transformers()
    settings = tokenizer.variables | ({"chat_template": template} if template else {})
    files = {
        "tokenizer.json": tokenizer.backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }
    return hf_config(GgufFile.read(path)), files
