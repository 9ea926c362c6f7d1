"""The bench "adapters" from end to end, with two real servers of one layer."""

from __future__ import annotations

import json

import pytest

from scripts.lab import adapters
from tests.conftest import COMPILED
from tests.demo.one_layer import one_layer


@pytest.mark.slow
def test_every_row_and_ratio_comes_from_one_run(tmp_path, capsys, free_port):
    out = tmp_path / "out.json"
    flags = ["--model", str(one_layer(tmp_path / "model")), "--streams", "8", "--seconds", "0.5", "--rounds", "2"]
    flags += ["--rate", "10", "--rank", "2", "--port", str(free_port), "--output-json", str(out)]
    of_servers = ["--max-num-batched-tokens", "16", "--compile-cache", str(COMPILED)]
    assert adapters.main([*flags, "--", *of_servers]) == 0
    results = json.loads(out.read_text())
    assert list(results) == [row.name for row in adapters.ROWS]
    for name, rounds in results.items():
        assert len(rounds) == 2
        assert all(row["completed"] and not row["failed"] for row in rounds)
        visits = [row["visitors"]["completed"] for row in rounds if "visitors" in row]
        swaps = [row.get("num_swaps") for row in rounds]
        if name.endswith("no swaps"):
            assert (visits, swaps) == ([4, 4], [0, 0])
        elif name.endswith("swaps"):
            assert visits == [4, 4]
            assert all(swapped >= 4 for swapped in swaps)  # an adapter of the streams may lose its slot, and come again
        else:
            assert (visits, swaps) == ([], [None, None])
    printed = capsys.readouterr().out
    assert "base: with / without the flag (output tokens/s): " in printed
    assert printed.count("in 2 rounds)") == len(adapters.RATIOS)
