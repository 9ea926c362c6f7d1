"""scripts/convert_checkpoint.py, as its own process: it chooses its devices itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from model.checkpoint import load_orbax
from model.sharding import make_mesh
from model.source import resolve
from model.weights import load_hf
from tests.model import checkpoints
from tests.model.test_checkpoint import same

ROOT = Path(__file__).parents[2]


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-W", "error", "-m", "scripts.convert_checkpoint", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_converted_folder_is_a_model_with_the_same_weights(tmp_path):
    folder = checkpoints.write(tmp_path / "hf", "gqa2", num_files=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (folder / "tokenizer.json").write_text("{}")

    result = convert(folder, tmp_path / "out", "--tensor-parallel-size", 4, "--dtype", "float32")

    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "orbax",
        "tokenizer.json",
    ]
    found = resolve(str(tmp_path / "out"))
    assert found.eos_token_ids == (7, 8)
    options = {"dtype": jnp.float32, "mesh": make_mesh(4)}
    same(load_orbax(tmp_path / "out" / "orbax", found.config, **options), load_hf(folder, found.config, **options))


@pytest.mark.parametrize(
    ("model", "complaint"),
    [("preset:llama-3-8b", "has no weights to convert"), ("nothing at all", "no model 'nothing at all'")],
)
def test_what_cannot_be_converted_is_refused_in_one_line(model, complaint, tmp_path):
    result = convert(model, tmp_path / "out")
    assert result.returncode == 1
    assert result.stderr.startswith("convert_checkpoint: ")
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1
