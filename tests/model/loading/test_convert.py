"""scripts/convert_checkpoint.py. As a process of its own it chooses its devices itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from model.config import LlamaConfig
from model.loading.source import resolve
from model.loading.weights import load_hf
from model.network.sharding import make_mesh
from scripts import convert_checkpoint
from tests.conftest import ANY_DEVICES
from tests.model import checkpoints, gguf_files
from tests.model.dense_attention import dense_logits
from tests.model.loaded import load_orbax
from tests.model.loading.test_orbax_format import same

ROOT = Path(__file__).parents[3]


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "scripts.convert_checkpoint", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ANY_DEVICES, capture_output=True, text=True, check=False)


def test_a_converted_folder_is_a_model_with_the_same_weights(tmp_path):
    folder = checkpoints.write(tmp_path / "hf", "gqa2", num_files=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("a template")

    result = convert(folder, tmp_path / "out", "--dtype", "float32")

    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "a template"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "additional_chat_templates",
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
    ("variant", "file_dtype", "stored", "words"),
    [
        ("gqa2", np.float32, "float32", "as float32 (the checkpoint's own)"),
        ("bf16", ml_dtypes.bfloat16, "bfloat16", "as bfloat16 (the checkpoint's own)"),
        ("gqa2", np.float16, "float32", "as float32 (which holds float16 exactly, as bfloat16 does not; --dtype"),
    ],
)
def test_no_bit_of_a_logit_changes_unless_a_type_is_asked_for(variant, file_dtype, stored, words, tmp_path, capsys):
    folder = checkpoints.write(tmp_path / "hf", variant)
    save_file({key: value.astype(file_dtype) for key, value in checkpoints.tensors(variant).items()},
              folder / "model.safetensors")  # fmt: skip

    assert convert_checkpoint.main([str(folder), str(tmp_path / "out")]) == 0
    assert words in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "orbax" / "stored.json").read_text())["dtype"] == stored
    sequence = checkpoints.golden_sequence(variant)
    ours, original = (
        np.asarray(dense_logits(load(resolve(str(where)).config, dtype=jnp.float32), sequence))
        for where, load in (
            (tmp_path / "out", partial(load_orbax, tmp_path / "out" / "orbax")),
            (folder, partial(load_hf, folder)),
        )
    )
    np.testing.assert_array_equal(ours.view(np.uint32), original.view(np.uint32))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def killed(source: Path, folder: Path, where: str) -> None:
    """A conversion by a process that is killed as it calls `where`."""
    code = (
        "import os, signal, sys\n"
        "from scripts import convert_checkpoint as command\n"
        f"command.{where} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "command.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, str(source), str(folder)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("where", ["choose_dtype", "write_whole", "write_config"])
def test_what_a_killed_conversion_has_left_is_neither_served_nor_touched(where, tmp_path, capsys):
    source, out = checkpoints.write(tmp_path / "hf", "gqa2"), tmp_path / "out"
    (source / "tokenizer.json").write_text("{}")
    killed(source, out, where)
    with pytest.raises(ValueError, match=r"out has no config\.json: its conversion has not ended: delete the folder"):
        resolve(str(out))
    before = contents(out)
    assert convert_checkpoint.main([str(source), str(out)]) == 2
    said = capsys.readouterr().err
    assert f"{out} holds an unfinished conversion, which may be running: delete it if not, or name another" in said
    assert len(said.splitlines()) == 1
    assert contents(out) == before


def test_a_folder_with_anything_else_is_not_touched(tmp_path, capsys):
    source, out = checkpoints.write(tmp_path / "hf", "gqa2"), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert convert_checkpoint.main([str(source), str(out)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert contents(out) == {"notes.txt": b"mine"}


def test_of_two_conversions_into_one_folder_one_writes(tmp_path, capsys, monkeypatch):
    """The second one has looked into the folder before the first one begins."""
    source, out = checkpoints.write(tmp_path / "hf", "gqa2"), tmp_path / "out"
    out.mkdir()
    looked = Path.iterdir

    def overtaken(self):
        found = [*looked(self)]
        if self == out:
            monkeypatch.undo()
            killed(source, out, "choose_dtype")
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", overtaken)
    assert convert_checkpoint.main([str(source), str(out)]) == 2
    assert "holds an unfinished conversion, which may be running" in capsys.readouterr().err


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("fault", ["tokenizer", "weights"])
def test_what_is_refused_leaves_nothing_behind(fault, exists, tmp_path, capsys):
    source, out = checkpoints.write(tmp_path / "hf", "gqa2"), tmp_path / "out"
    if fault == "tokenizer":  # this file has none
        source = gguf_files.write(tmp_path / "m.gguf", LlamaConfig.from_file(source), checkpoints.tensors("gqa2"))
    else:
        (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-8])
    if exists:
        out.mkdir()
    assert convert_checkpoint.main([str(source), str(out)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert ("tokenizer.ggml.model=None is not supported" if fault == "tokenizer" else "download it again") in said
    assert out.exists() == exists
    assert not exists or not [*out.iterdir()]


def test_rounding_has_to_be_asked_for_and_is_said(tmp_path, capsys):
    folder = checkpoints.write(tmp_path / "hf", "gqa2")
    assert convert_checkpoint.main([str(folder), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "as bfloat16 (as asked for; rounded from float32)" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("model", "complaint"),
    [("preset:llama-3-8b", "has no weights to convert"), ("nothing at all", "no model 'nothing at all'")],
)
def test_what_cannot_be_converted_is_refused_in_one_line(model, complaint, tmp_path, capsys):
    assert convert_checkpoint.main([model, str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("convert_checkpoint: ")
    assert complaint in said
    assert len(said.splitlines()) == 1
