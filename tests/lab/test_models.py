"""The bench "models" from end to end, with real servers of one layer."""

from __future__ import annotations

import json

import pytest

from scripts.lab import models
from tests.conftest import COMPILED
from tests.demo.one_layer import one_layer


@pytest.mark.slow
def test_every_way_is_measured_next_to_one_model_alone(tmp_path, capsys, free_port):
    out = tmp_path / "out.json"
    flags = ["--model", str(one_layer(tmp_path / "model")), "--streams", "10", "--seconds", "0.5", "--rounds", "2"]
    flags += ["--rate", "10", "--ways", models.RESIDENT, models.DISK, "--port", str(free_port)]
    flags += ["--output-json", str(out)]
    assert models.main([*flags, "--", "--max-num-batched-tokens", "16", "--compile-cache", str(COMPILED)]) == 0
    results = json.loads(out.read_text())
    assert list(results) == [models.RESIDENT, models.DISK]
    for way, rows in results.items():
        assert list(rows) == [row.name for row in models.ROWS if row.server in (models.ALONE, way)]
        for name, rounds in rows.items():
            assert len(rounds) == 2
            assert all(row["completed"] and not row["failed"] for row in rounds)
            visits = [row["visitors"]["completed"] for row in rounds if "visitors" in row]
            assert visits == [4, 4] * ("visitors" in name)
    printed = capsys.readouterr().out
    assert "ten on the device, Zipf / one model alone (output tokens/s): " in printed
