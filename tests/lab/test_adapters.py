"""The bench "adapters" from end to end, with two real servers of one layer."""

from __future__ import annotations

import json

import pytest

from model.loading.source import resolve
from scripts.lab import adapters
from scripts.lab.load.mid import write_mid
from tests.conftest import EXPORTED
from tests.demo.one_layer import one_layer


@pytest.mark.slow
def test_every_row_and_ratio_comes_from_one_run(tmp_path, capsys, free_port):
    out = tmp_path / "out.json"
    flags = ["--model", str(one_layer(tmp_path / "model")), "--streams", "8", "--seconds", "0.5", "--rounds", "2"]
    flags += ["--rate", "10", "--rank", "2", "--port", str(free_port), "--output-json", str(out)]
    of_servers = ["--max-num-batched-tokens", "16", "--export-cache", str(EXPORTED)]
    assert adapters.main([*flags, "--", *of_servers]) == 0
    results = json.loads(out.read_text())
    assert list(results) == [row.name for row in adapters.ROWS]
    for name, rounds in results.items():
        assert len(rounds) == 2
        assert all(row["completed"] and not row["failed"] for row in rounds)
        visits = [row["visitors"]["completed"] for row in rounds if "visitors" in row]
        swaps = [row["num_swaps"] for row in rounds]
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


def test_the_model_of_random_weights_can_be_served(tmp_path):
    config = write_mid(tmp_path / "mid")
    assert resolve(str(tmp_path / "mid"), weights=False).config == config
    layer = config.hidden_size * (2 * 768 + 2 * 256 + 3 * config.intermediate_size)
    assert 106e6 < config.num_layers * layer + config.vocab_size * config.hidden_size < 108e6


def test_fewer_streams_than_adapters_are_refused(capsys):
    assert adapters.main(["--streams", "4"]) == 2
    assert "--streams is at least 8" in capsys.readouterr().err
