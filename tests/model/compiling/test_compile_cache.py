"""Compilations on disk, in processes of their own: the cache's folder is a setting of the whole process."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

from model.compiling.compile_cache import COMPILED, CompileCounter, keep_compilations

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path
import jax, numpy as np
from model.compiling.compile_cache import CompileCounter, keep_compilations
keep_compilations(Path(sys.argv[1]))
counter = CompileCounter()
for n in (3, 5):
    jax.jit(lambda x: x * 2 + 1)(np.ones(n, np.float32))
print(counter.total, counter.from_cache_in_this_thread)
"""


def start(folder: Path) -> tuple[list[int], str]:
    """How many programs one process needed and found, and what it said."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return list(map(int, process.stdout.split())), process.stderr


def test_a_second_process_compiles_nothing_anew(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    assert [start(folder)[0] for _ in range(2)] == [[2, 0], [2, 2]]  # however short they were
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda _: b"", lambda content: content[::-1]])
def test_a_damaged_program_is_named_once_and_made_again(tmp_path, damage):
    start(tmp_path)
    damaged, _ = [path for path in tmp_path.rglob("*") if path.is_file()]
    damaged.write_bytes(damage(damaged.read_bytes()))
    counts, said = start(tmp_path)
    assert counts == [2, 1]
    assert f"{damaged} is damaged: the compiled program is made again" in said
    assert start(tmp_path) == ([2, 2], "")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, mode):
    """A compiled program runs as code."""
    tmp_path.chmod(mode)
    with pytest.raises(ValueError, match="--compile-cache: other users may write to") as error:
        keep_compilations(tmp_path)
    assert f"{tmp_path}" in str(error.value) and "chmod 700" in str(error.value)


def test_a_file_that_others_can_write_to_is_made_again(tmp_path):
    start(tmp_path)
    open_to_others, _ = [path for path in tmp_path.rglob("*") if path.is_file()]
    open_to_others.chmod(0o666)
    counts, said = start(tmp_path)
    assert (counts, f"other users may write to {open_to_others}" in said) == ([2, 1], True)
    assert start(tmp_path) == ([2, 2], "")


def test_every_program_is_counted_once():
    counter = CompileCounter()
    drawn = random.random()  # a program that no earlier run of the tests has kept
    function = jax.jit(lambda x: x - drawn)
    for _ in range(3):
        function(np.ones(11, np.float32))
    assert (counter.total, counter.from_cache_in_this_thread) == (1, 0)


def test_a_counter_that_is_gone_takes_no_event_from_another():
    gone, counter = CompileCounter(), CompileCounter()
    held = weakref.ref(gone)
    del gone
    gc.collect()
    assert held() is None
    jax.monitoring.record_event_duration_secs(COMPILED, 0.0)
    assert counter.total == 1
