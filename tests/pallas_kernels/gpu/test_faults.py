"""The test of the tests: a kernel with a fault in its synchronisation or its masks must not pass them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pallas_kernels.gpu.faults import FAULTS, MAY_HANG, NO_FAULT, findings
from tests.pallas_kernels.gpu.interpreted import Findings

STUCK_AFTER_S = 3.0  # without a thread that ran or was ready to
HANGS_AFTER_S = 300  # where /proc does not tell; a run takes a few seconds


@pytest.mark.parametrize("name", NO_FAULT)
def test_no_fault_no_findings(name):
    assert findings(NO_FAULT[name]) == Findings()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    assert findings(FAULTS[name]) != Findings()


def in_a_process(name: str) -> str:
    """The findings as they are printed, or "it hangs"."""
    command = [sys.executable, "-m", "tests.pallas_kernels.gpu.faults", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        started = stirred = time.monotonic()
        last_ran_ns = None
        while True:
            try:
                printed, error = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                now, ran_ns = time.monotonic(), ran_while_asleep(process.pid)
                if ran_ns is None or ran_ns != last_ran_ns:
                    stirred, last_ran_ns = now, ran_ns
                if now - stirred > STUCK_AFTER_S or now - started > HANGS_AFTER_S:
                    process.kill()
                    return "it hangs"
    assert process.returncode == 0, error[-4000:]
    return printed.strip()


def ran_while_asleep(pid: int) -> int | None:
    """Nanoseconds that the process's threads have run; None where one is awake, or where nobody counts them."""
    ran_ns = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # no /proc, or a thread that ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "S":
                return None
            ran_ns += int((task / "schedstat").read_text().split()[0])
        return ran_ns
    return None


@pytest.mark.parametrize("name", MAY_HANG)
def test_a_fault_that_may_hang_the_interpreter_is_found(name):
    assert in_a_process(name) != repr(Findings())


def test_no_fault_no_findings_in_a_process():
    assert in_a_process("none, prefill") == repr(Findings())
