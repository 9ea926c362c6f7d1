"""The demo's first layer as a checkpoint: its programs take a third of the time to compile."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401, NumPy learns bfloat16
from safetensors.numpy import load_file, save_file

from model.loading.source import DEMO_FOLDER

_OTHER_LAYERS = re.compile(r"model\.layers\.[1-9]")


def one_layer(folder: Path) -> Path:
    """Writes it to `folder`, which must not be there."""
    shutil.copytree(DEMO_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not _OTHER_LAYERS.match(name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
