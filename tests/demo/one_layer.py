"""The demo's first layers as a checkpoint: the programs of one take a third of the time to compile."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401, NumPy learns bfloat16
from safetensors.numpy import load_file, save_file

from model.loading.source import DEMO_FOLDER


def one_layer(folder: Path) -> Path:
    """Writes it to `folder`, which must not be there."""
    return first_layers(folder, 1)


def first_layers(folder: Path, count: int) -> Path:
    """As `one_layer`, with `count` layers. Of two, one has the pages behind the other's."""
    shutil.copytree(DEMO_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": count}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not re.match(rf"model\.layers\.[{count}-9]", name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
