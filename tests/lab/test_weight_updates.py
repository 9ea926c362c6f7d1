"""The instrument "weight_updates": its table from a real engine, and the memory that it sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lab import weight_updates
from tests.demo.one_layer import one_layer

PEAK = """
import numpy as np
from scripts.lab.weight_updates import measured
kept = []
def work():
    np.ones(64 << 20, np.uint8)
    kept.append(np.ones(16 << 20, np.uint8))
print(measured(work)[1])
"""


def test_memory_that_is_given_back_is_seen() -> None:
    # In a process of its own: no other test's memory goes back meanwhile.
    peak = float(subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True).stdout)
    assert 60 < peak < 100


@pytest.mark.slow
def test_a_form_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(one_layer(tmp_path / "model"))
    assert weight_updates.main(["--model", model, "--forms", "float32", "--updates", "2"]) == 0
    (cells,) = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| float32")]
    assert all(float(cell) >= 0 for cell in cells[1:]) and float(cells[2]) > 0
