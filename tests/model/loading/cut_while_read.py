"""A process that reads files which another one cuts: for each line of a kind and a path it says `open` when the files
are open, waits for a line, reads all tensors, and says in a line how that ended."""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from model.inputs.gguf import GgufFile
from model.loading.adapter import read_adapter
from model.loading.eagle_head import load_head
from model.loading.gguf_config import gguf_model_config
from model.loading.weights import load_hf
from tests.model import adapters
from tests.model.loading.test_eagle_head import config_of

# How a kind is read, and what is called once its files are open.
KINDS = {
    "adapter": (lambda path: read_adapter(path, adapters.base_config(), max_rank=4), "model.loading.adapter", "_pair"),
    "model": (
        lambda path: load_hf(path, gguf_model_config(GgufFile.read(path)), dtype="float32"),
        "model.loading.weights", "module_reader",
    ),
    "head": (
        lambda path: load_head(path, config_of(), dtype="float32", has_embedding=False),
        "model.loading.eagle_head:HeadFiles", "tokens",
    ),
}  # fmt: skip


def main() -> None:
    for line in sys.stdin:
        kind, path = line.split()
        print(outcome(kind, Path(path)), flush=True)


def outcome(kind: str, path: Path) -> str:
    read, owner, name = KINDS[kind]
    patched = pkgutil.resolve_name(owner)
    go_on, waits = getattr(patched, name), iter(["open"])

    def called(*args: Any, **kwargs: Any) -> Any:
        for said in waits:
            print(said, flush=True)
            sys.stdin.readline()
        return go_on(*args, **kwargs)

    with mock.patch.object(patched, name, called):
        try:
            read(path)
        except (ValueError, OSError) as error:
            return str(error)
    return "read"


if __name__ == "__main__":
    main()
