"""Files of others may be written anew at any time. A process that reads the map of a file that has become shorter is
killed by a signal, so a process of its own reads here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from model.config import LlamaConfig
from tests.model import adapters, checkpoints, gguf_files
from tests.model.goldens import make_eagle
from tests.model.goldens.make_adapters import GGUF


def a_model(folder: Path) -> Path:
    config = LlamaConfig.from_file(checkpoints.write(folder / "model", "gqa2"))
    return gguf_files.write(folder / "model.gguf", config, checkpoints.tensors("gqa2"))


def a_head(folder: Path) -> Path:
    (folder / "head").mkdir()
    return Path(shutil.copy(make_eagle.FOLDER / "eagle3.bin", folder / "head" / "pytorch_model.bin"))


def an_adapter(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (file,) = Path(shutil.copytree(adapters.folder(name), folder / name)).glob("adapter_model.*")
        return file

    return make


CASES = {
    "adapter of torch": ("adapter", an_adapter("torch_file")),
    "adapter of safetensors": ("adapter", an_adapter("q_and_v")),
    "adapter of llama.cpp": ("adapter", lambda folder: Path(shutil.copy(GGUF, folder / "x.gguf"))),
    "model of llama.cpp": ("model", a_model),
    "head of torch": ("head", a_head),
}


@pytest.fixture(scope="module")
def reader() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.model.loading.cut_while_read"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()
        assert process.wait() == 0


def said(process: subprocess.Popen[str], line: str) -> str:
    to_it: IO[str] = process.stdin
    to_it.write(line + "\n")
    to_it.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "written anew"])
@pytest.mark.parametrize("case", CASES)
def test_a_file_that_changes_while_it_is_read_is_refused_in_words(reader, case, is_cut, tmp_path):
    kind, make = CASES[case]
    file = make(tmp_path)
    asked = file if file.suffix == ".gguf" else file.parent
    content = file.read_bytes()
    assert said(reader, f"{kind} {asked}") == "open"
    if is_cut:
        os.truncate(file, 0)
        assert said(reader, "") == f"{file} has become shorter while it was read: try again"
        file.write_bytes(content)
    else:
        file.write_bytes(content)
        os.utime(file, ns=(0, 0))
        assert "changed while it was read" in said(reader, "")
    assert said(reader, f"{kind} {asked}") == "open"
    assert said(reader, "") == "read"
