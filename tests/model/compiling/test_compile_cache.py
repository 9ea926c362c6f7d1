"""Compilations on disk, in processes of their own: the cache's folder is a setting of the whole process."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import weakref

import jax
import numpy as np

from model.compiling.compile_cache import COMPILED, CompileCounter

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


def test_a_second_process_compiles_nothing_anew(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    counts = []
    for _ in range(2):
        process = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True, timeout=120
        )
        counts.append(tuple(map(int, process.stdout.split())))
    assert counts == [(2, 0), (2, 2)]  # however short they were


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
