"""The digest of a checkpoint is of its content, wherever it lies."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import fsspec
import pytest

from model.config import LlamaConfig
from model.inputs.paths import place
from model.inputs.remote import RemotePath
from model.loading.orbax_format import save_orbax
from model.loading.source import CONVERTED, DEMO_FOLDER
from model.loading.stored_weights import find_weights
from model.loading.weights import load_hf
from model.loading.weights_digest import files_digest, weights_digest

WEIGHTS = "model.safetensors"


def digest(folder: Path) -> str:
    return weights_digest(find_weights(folder, LlamaConfig.from_file(folder)))


@pytest.fixture
def copy(tmp_path) -> Path:
    (tmp_path / "copy").mkdir()
    for name in ("config.json", WEIGHTS):
        shutil.copy(DEMO_FOLDER / name, tmp_path / "copy" / name)
    return tmp_path / "copy"


def test_a_copy_has_the_same_digest(copy):
    os.utime(copy / WEIGHTS, (0, 0))
    assert digest(copy) == digest(DEMO_FOLDER)


def test_any_bit_counts_and_no_time_does(copy):
    before = digest(copy)
    status = (copy / WEIGHTS).stat()
    with (copy / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(copy / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest(copy) != before


def test_the_config_counts(copy):
    stored = find_weights(copy, LlamaConfig.from_file(copy))
    other = replace(stored, config=replace(stored.config, rms_norm_eps=1e-3))
    assert weights_digest(other) != weights_digest(stored)


def test_a_file_of_the_hub_is_named_by_its_content(tmp_path):
    """So it is not read: here it has another content, to tell."""
    content = b"weights"
    plain = tmp_path / "plain" / "model.safetensors"
    plain.parent.mkdir()
    plain.write_bytes(content)
    blob = tmp_path / "blobs" / sha256(content).hexdigest()
    blob.parent.mkdir()
    blob.write_bytes(b"other")
    link = tmp_path / "snapshots" / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to(blob)
    assert files_digest([link]) == files_digest([plain])
    blob.rename(tmp_path / "blobs" / "a-name")
    link.unlink()
    link.symlink_to(tmp_path / "blobs" / "a-name")
    assert files_digest([link]) != files_digest([plain])


def test_every_file_of_a_conversion_counts(copy):
    config = LlamaConfig.from_file(copy)
    save_orbax(load_hf(copy, config, dtype="bfloat16"), copy / CONVERTED, config)
    stored = find_weights(copy, config)
    before = weights_digest(stored)
    (copy / WEIGHTS).unlink()
    assert weights_digest(stored) == before
    for file in [path for path in (copy / CONVERTED).rglob("*") if path.is_file() and path.stat().st_size]:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert weights_digest(stored) != before
        file.write_bytes(content)
    assert weights_digest(stored) == before


def test_an_object_counts_by_its_version():
    fsspec.filesystem("memory").store.clear()
    file = place("memory://bucket/folder/model.safetensors", "--model")
    assert isinstance(file, RemotePath)
    file.write_bytes(b"weights")
    before = files_digest([file])
    assert files_digest([file]) == before
    file.write_bytes(b"WEIGHTS")
    assert files_digest([file]) != before
