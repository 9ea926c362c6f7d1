"""The account of a start on chips that are not here: its arithmetic by hand, and a small model by the real compiler."""

from __future__ import annotations

import json
import re

import pytest

from batcher.buckets import BucketLadder
from batcher.step import Variant
from scripts.building.limits import bucket_config
from scripts.flags.settings import EngineSettings
from scripts.lab import startup
from scripts.lab.planning.ladder import Cost, ready_after, traced_after

GREEDY, SAMPLE, SCORE = Variant.GREEDY, Variant.SAMPLE, Variant.SCORE


def cost(python: float, compiling: float) -> Cost:
    return Cost(trace=python, lower=0.0, compile=compiling)


@pytest.mark.parametrize(
    ("programs", "num_cores", "seconds"),
    [
        ([], 4, 0.0),
        ([cost(1, 10)], 1, 11.0),
        ([cost(1, 10), cost(1, 10)], 1, 22.0),  # one core: everything one after the other
        ([cost(1, 10), cost(1, 10)], 2, 12.0),  # the second is compiled by the core that has traced
        ([cost(1, 10), cost(1, 10), cost(1, 2)], 3, 12.0),
        ([cost(5, 1), cost(5, 1)], 44, 11.0),  # tracing decides
        ([cost(1, 2), cost(1, 20)], 44, 22.0),  # the longest comes last
    ],
)
def test_ready_by_hand(programs, num_cores, seconds):
    assert ready_after(programs, num_cores) == seconds


def test_programs_that_other_processes_trace_are_read():
    programs = [cost(3, 1) for _ in range(8)]
    traced, ends = traced_after(programs, 2)  # which begin after 2 s: the last is kept after 5, the sixth after 8
    assert ends == [2.0 + 4 * 3, 2.0 + 4 * 3]
    assert traced == pytest.approx([3, 6, 9, 12, 12.1, 12.2, 12.3, 12.4])
    assert ready_after(programs, 44, 2) == pytest.approx(13.4)
    assert ready_after(programs, 44) == 25.0


@pytest.mark.parametrize(
    ("platform", "chips", "steps"), [("tpu", 1, 16), ("tpu", 8, 27), ("gpu", 1, 29), ("cpu", 1, 25)]
)
def test_programs_of_a_server(platform, chips, steps):
    """One TPU draws for the rows in use only, so its prompts need no programs for a few rows."""
    config = bucket_config(EngineSettings(), platform, chips)
    assert len(BucketLadder(config).buckets()) == steps


@pytest.mark.targets
@pytest.mark.slow
def test_the_ladder_of_a_small_model(tmp_path, capsys):
    pytest.importorskip("libtpu")
    flags = ["--model", "1b", "--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "128"]
    out = tmp_path / "out.json"
    programs = ["--programs", "greedy:8", "sample:8", "patch", "--layers", "1", "2", "--cores", "2"]
    assert startup.main(["--target", "v6e:1x1", *programs, "--output-json", str(out), *flags]) == 0
    printed = capsys.readouterr().out
    assert "preset:llama-3.2-1b, 16 layers, on 1 x v6e: 7 programs" in printed
    assert "compiled with 1 and 2 layers; 16 layers are taken to cost more in proportion" in printed
    assert "not counted, because none of their kind was compiled: score:128x8, sample:128x8" in printed
    assert re.search(r"-?[\d.]+ of sample:8 are its sampling, which 3 programs have", printed)
    assert re.search(r"on 2 cores: ready after \d+ s", printed)
    measured = {entry["name"]: entry["cost"] for entry in json.loads(out.read_text()) if entry["cost"] is not None}
    assert measured.keys() == {"greedy:8", "sample:8", "patch"}
    assert all(seconds > 0 for seconds in measured["greedy:8"].values())
