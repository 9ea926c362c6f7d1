"""The test of the tests: a kernel with a fault in its synchronisation or its masks must not pass them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.pallas_kernels.gpu.faults import FAULTS, MAY_HANG, NO_FAULT, findings
from tests.pallas_kernels.gpu.interpreted import Findings

HANGS_AFTER_S = 45  # a run takes a few seconds


@pytest.mark.parametrize("name", NO_FAULT)
def test_no_fault_no_findings(name):
    assert findings(NO_FAULT[name]) == Findings()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    assert findings(FAULTS[name]) != Findings()


def in_a_process(name: str, timeout_s: float | None) -> str:
    command = [sys.executable, "-m", "tests.pallas_kernels.gpu.faults", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return "it hangs"
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


@pytest.mark.parametrize("name", MAY_HANG)
def test_a_fault_that_may_hang_the_interpreter_is_found(name):
    assert in_a_process(name, HANGS_AFTER_S) != repr(Findings())


def test_no_fault_no_findings_in_a_process():
    assert in_a_process("none, prefill", None) == repr(Findings())
