"""The small files of a model's folder, written from the metadata of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.inputs.gguf import GgufFile
from model.loading.gguf_config import hf_config
from server.text.gguf_tokenizer import read_gguf_tokenizer


def write_small_files(path: Path, folder: Path) -> dict[str, Any]:
    """Writes the tokenizer's files to `folder`. Returns the content of its `config.json`, which is not written."""
    tokenizer = read_gguf_tokenizer(path)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = tokenizer.variables | ({"chat_template": tokenizer.chat_template} if tokenizer.chat_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return hf_config(GgufFile.read(path))
