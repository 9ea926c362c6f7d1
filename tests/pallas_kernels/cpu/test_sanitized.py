"""The C code under the compiler's sanitizers, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.c_compiler import compiler


def test_nothing_is_read_or_written_outside_of_the_buffers(tmp_path):
    """A process with gcc's sanitizers in the C code runs the self-test over all kinds."""
    found = {
        name: subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    }
    missing = [name for name, path in found.items() if not Path(path).is_absolute()]
    if missing:
        pytest.skip(f"the compiler has no {' or '.join(missing)}")
    script = Path(__file__).with_name("sanitized.py")
    environment = os.environ | {
        "LD_PRELOAD": " ".join(found.values()),
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99",
        "UBSAN_OPTIONS": "halt_on_error=1:exitcode=99",
    }
    command = [sys.executable, str(script), str(tmp_path / "library.so")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = ["float32", "bfloat16", "int8", "products", "four-bit", "tokens", "weights", "zeros", "overrun"]
    assert done.stdout.split() == printed
