"""Small pages, and stores of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from model.inputs.paths import Place
from model.page_files.page_file import PageIdentity
from model.page_files.store import PageFiles

PAGE_BYTES, PAGE_SIZE = 48, 4
HEAD_BYTES = 80  # before the bytes of the page: 56 say what it is of, then 16 of tokens and 8 of the checksum
FILE_BYTES = HEAD_BYTES + PAGE_BYTES
IDENTITY = PageIdentity(
    weights="w", draft_weights="", computation="float32", contents="K/V", layout="1 chip",
    page_size=PAGE_SIZE, page_bytes=PAGE_BYTES,
)  # fmt: skip


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def open_store(
    place: Place, *, identity: PageIdentity = IDENTITY, max_pages: int = 1000, **options: object
) -> PageFiles:
    """A store that has listed its folder, and lists it again when a test says so."""
    store = PageFiles(place, identity, max_bytes=max_pages * FILE_BYTES, list_every_s=1e6, **options)
    store.refresh()
    return store


@pytest.fixture
def opened() -> Iterator[Callable[..., PageFiles]]:
    """As `open_store`. The stores are closed after the test."""
    with ExitStack() as stores:
        yield lambda *args, **options: stores.enter_context(closing(open_store(*args, **options)))


def digest_of(number: int) -> bytes:
    return bytes([number % 256]) + number.to_bytes(15)


def tokens_of(number: int) -> bytes:
    return np.arange(number, number + PAGE_SIZE, dtype=np.int32).tobytes()


def page_of(number: int, weights: int = 0) -> np.ndarray:
    return np.random.default_rng((number, weights)).integers(0, 256, PAGE_BYTES, np.uint8)


def put(store: PageFiles, number: int, weights: int = 0) -> bool:
    return store.store(digest_of(number), tokens_of(number), page_of(number, weights))


def get(store: PageFiles, number: int) -> np.ndarray | None:
    """The bytes that the store has for a page; None: it says that there are none."""
    page = np.full(PAGE_BYTES, 0xAA, np.uint8)
    return page if store.load(digest_of(number), tokens_of(number), page) else None


def has(store: PageFiles, number: int) -> bool:
    return store.has(digest_of(number))


def is_right(store: PageFiles, number: int, weights: int = 0) -> bool:
    found = get(store, number)
    return found is not None and np.array_equal(found, page_of(number, weights))


def files_in(folder: Path) -> list[Path]:
    """All files, the least recently used first."""
    return sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime_ns)


def file_of(folder: Path, number: int) -> Path:
    (path,) = folder.rglob(f"{digest_of(number).hex()}.page")
    return path


def used_at(path: Path, seconds: float) -> None:
    os.utime(path, (seconds, seconds))
