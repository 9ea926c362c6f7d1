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

from model.compiling.compile_cache import COMPILED, CompileCounter

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path
import jax, numpy as np
from model.compiling.compile_cache import CompileCounter, compile_lowered, keep_compilations
keep_compilations(Path(sys.argv[1]))
counter = CompileCounter()
lowered = [jax.jit(lambda x: x * 2 + 1).lower(np.ones(n, np.float32)) for n in (3, 5)]
found = [compile_lowered(one, {}).is_from_disk for one in lowered]
print(counter.total, sum(found))
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


def test_every_program_is_counted_once():
    counter = CompileCounter()
    drawn = random.random()  # a program that no earlier run of the tests has kept
    function = jax.jit(lambda x: x - drawn)
    for _ in range(3):
        function(np.ones(11, np.float32))
    assert counter.total == 1


def test_a_counter_that_is_gone_takes_no_event_from_another():
    gone, counter = CompileCounter(), CompileCounter()
    held = weakref.ref(gone)
    del gone
    gc.collect()
    assert held() is None
    jax.monitoring.record_event_duration_secs(COMPILED, 0.0)
    assert counter.total == 1
