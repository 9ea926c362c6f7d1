"""A child process: its result, its errors, and the threads that its numpy is told to have."""

from __future__ import annotations

import os
import signal
import time

import pytest

from scripts.building.child import BLAS, ChildError, in_child

LIMIT_S = 60.0


def test_the_child_is_told_its_threads_and_this_process_is_not(monkeypatch):
    monkeypatch.delenv(BLAS, raising=False)
    assert in_child(os.getenv, BLAS, limit_s=LIMIT_S, numpy_threads=2) == "2"
    assert BLAS not in os.environ
    monkeypatch.setenv(BLAS, "5")
    assert in_child(os.getenv, BLAS, limit_s=LIMIT_S, numpy_threads=2) == "5"
    assert os.environ[BLAS] == "5"


def test_a_child_that_raises_dies_or_hangs_is_an_error():
    with pytest.raises(ChildError, match="invalid literal for int"):
        in_child(int, "x", limit_s=LIMIT_S)
    with pytest.raises(ChildError, match="SIGSEGV"):
        in_child(signal.raise_signal, signal.SIGSEGV, limit_s=LIMIT_S)
    with pytest.raises(ChildError, match="did not end within 3 s"):
        in_child(time.sleep, 100, limit_s=3.0)
