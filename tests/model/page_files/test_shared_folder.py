"""Engines in processes of their own share a folder, are killed, and meet disks that are full or may not be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model.page_files.store import PAUSE_S
from tests.model.page_files.engine_process import MAX_PAGES, NUM_PAGES
from tests.model.page_files.pages import FILE_BYTES, Clock, digest_of, get, has, is_right, put, used_at

ROOT = Path(__file__).parents[3]


@pytest.fixture
def engine(tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts an engine's process on `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.model.page_files.engine_process", str(tmp_path), *args]
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A disk of its own that has room for a few dozen files."""
    path = tmp_path / "disk"
    path.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=160k,mode=700", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def lines(process: subprocess.Popen[str], number: int) -> None:
    """Waits for so many calls of a process."""
    for _ in range(number):
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline(), process.stderr.read()


def test_an_engine_goes_on_when_another_one_is_killed(tmp_path, engine, opened):
    first, second = engine("1"), engine("2")
    for round in range(3):
        lines(first, 50)
        lines(second, 50)
        second.send_signal(signal.SIGKILL)
        assert second.wait(60) == -signal.SIGKILL
        lines(first, 50)
        second = engine(str(3 + round))
    for process in (first, second):
        lines(process, 50)
        out, error = process.communicate("end", timeout=60)
        assert process.returncode == 0, error
        assert out.splitlines()[-1] == "done True"
    for path in tmp_path.rglob("*.page.*"):
        used_at(path, 0)
    store = opened(tmp_path, max_pages=MAX_PAGES)
    kept = [number for number in range(NUM_PAGES) if has(store, number)]
    assert 0 < len(kept) <= MAX_PAGES and all(is_right(store, number) for number in kept)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) == len(kept) and store.bytes_on_disk == len(found) * FILE_BYTES


def test_a_kill_before_a_file_has_its_name_leaves_nothing_for_ever(tmp_path, engine, opened):
    process = engine("1", "--stop-before-rename")
    lines(process, 1)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    store = opened(tmp_path)
    (left,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert left.name.startswith(f"{digest_of(100).hex()}.page.") and left.stat().st_size == FILE_BYTES
    assert not has(store, 100) and get(store, 100) is None
    assert put(store, 100) and is_right(store, 100) and left.exists()
    used_at(left, 0)
    store.refresh()
    assert not left.exists() and is_right(store, 100)


@pytest.mark.parametrize("most", [0, 1, FILE_BYTES - 1, FILE_BYTES])
def test_a_write_that_ends_early_leaves_nothing(tmp_path, engine, most):
    out, error = engine("1", "--most-file-bytes", str(most)).communicate(timeout=60)
    is_stored = most == FILE_BYTES
    assert out == f"{is_stored} {int(not is_stored)}\n", error
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == is_stored


def test_a_full_disk_is_left_alone_for_a_while(disk, opened, caplog):
    clock = Clock()
    store = opened(disk, clock=clock)
    number = 0
    while put(store, number):
        number += 1
        assert number < 1000
    assert number > 0 and len(caplog.records) == 1 and "No space left on device" in caplog.text
    assert all(is_right(store, stored) for stored in range(number))
    assert list(disk.rglob("*.page.*")) == [], "what was begun is deleted"
    for path in disk.rglob("*.page"):
        path.unlink()
    clock.now_s = PAUSE_S - 1
    assert not put(store, number) and store.num_failed == 2
    clock.now_s = PAUSE_S
    assert put(store, number) and is_right(store, number)


def test_a_folder_that_may_only_be_read_is_read(disk, opened, caplog):
    first = opened(disk)
    assert put(first, 1) and put(first, 2)
    first.close()
    broken = next(disk.rglob(f"{digest_of(2).hex()}.page"))
    broken.write_bytes(b"")
    left = broken.with_name(f"{broken.name}.{'0' * 16}")
    left.write_bytes(b"")
    used_at(left, 0)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    store = opened(disk)
    assert is_right(store, 1) and put(store, 1), "it is there"
    assert get(store, 2) is None and not put(store, 3)
    assert (store.num_loaded, store.num_stored, store.num_broken, store.num_failed) == (1, 0, 1, 2)
    assert "Read-only file system" in caplog.text and len(caplog.records) == 1
