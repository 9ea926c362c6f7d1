"""LoRA adapters without weights: a folder's file says what an engine answers to its requests."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from server.engine.adapters import AdapterError, Adapters
from server.engine.wire import LoadAdapter

TEXT, READS, DELAY = "text", "reads", "delay_s"


class FakeStore:
    """`server.engine.adapters.AdapterStore`. The file `reads` of a folder gets a line each time that it is read, or
    cannot be read."""

    def __init__(self, refused: str = "", changes: str = "") -> None:
        self.texts: dict[int, str] = {}  # by identity
        self.forgotten: list[str] = []
        self._refused = refused  # the name of a folder that this store refuses
        self._changes = changes  # what this store finds besides a folder's text

    def load(self, path: str) -> int:
        folder = Path(path)
        if not folder.is_dir():
            raise AdapterError(f"lora_path: {path!r} is no folder", 404)
        with (folder / READS).open("a") as reads:
            reads.write("read\n")
        if (folder / DELAY).exists():
            time.sleep(float((folder / DELAY).read_text()))
        if not (folder / TEXT).exists() or folder.name == self._refused:
            raise ValueError(f"{folder} holds no adapter_config.json")
        text = (folder / TEXT).read_text() + self._changes
        identity = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) | 1
        self.texts[identity] = text
        return identity

    def forget(self, identity: int) -> None:
        self.forgotten.append(self.texts.pop(identity))


def fake_adapters(engine: Any, store: FakeStore, modules: Iterable[tuple[str, str]] = ()) -> Adapters:
    """The adapters of an engine, of which those in `modules` are loaded: names and folders."""
    adapters = Adapters(store, engine)
    for name, path in modules:
        adapters.change(LoadAdapter(name, path))
    return adapters


def write_adapter(folder: Path, text: str | None, delay_s: float = 0.0) -> Path:
    """A folder with an adapter; `text` None: a broken one."""
    folder.mkdir(parents=True, exist_ok=True)
    if text is not None:
        (folder / TEXT).write_text(text)
    if delay_s:
        (folder / DELAY).write_text(str(delay_s))
    return folder


def num_reads(folder: Path) -> int:
    """How often the folder has been read, by all engines."""
    return (folder / READS).read_text().count("\n") if (folder / READS).exists() else 0
