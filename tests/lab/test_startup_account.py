"""The account of a start on chips that are not here: its arithmetic by hand, and a small model by the real compiler."""

from __future__ import annotations

import json
import re

import pytest

from batcher.buckets import BucketLadder
from batcher.step import Bucket, Variant
from scripts.building.limits import bucket_config
from scripts.flags.settings import EngineSettings
from scripts.lab import startup, startup_account
from scripts.lab.planning import ladder
from scripts.lab.planning.ladder import Cost, Question, costs, entries, name_of, ready_after, traced_after
from scripts.lab.planning.target import parse_target

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


def test_names():
    assert name_of(Bucket(64, 64, GREEDY)) == "greedy:64"
    assert name_of(Bucket(512, 256, SAMPLE)) == "sample:512x256"
    assert name_of(Bucket(32, 8, SAMPLE, num_drafts=3, has_adapters=True)) == "sample:32x8+3 drafts+adapters"
    assert name_of("patch") == "patch"


def test_a_program_takes_the_cost_of_the_nearest_of_its_kind():
    mixed = [Bucket(tokens, 8, SAMPLE) for tokens in (64, 128, 1024)]
    decodes = [Bucket(8, 8, GREEDY), Bucket(8, 8, SAMPLE)]
    found = {"sample:64x8": cost(1, 1), "sample:1024x8": cost(1, 5), "greedy:8": cost(0, 2)}
    whole = entries([*decodes, *mixed], ["patch"], found)
    assert [(entry.name, entry.cost and entry.cost.total, entry.taken_from) for entry in whole] == [
        ("sample:1024x8", 6, None),
        ("sample:128x8", 2, "sample:64x8"),
        ("sample:64x8", 2, None),
        ("sample:8", None, None),
        ("greedy:8", 2, None),
        ("patch", None, None),
    ]


def test_two_depths_are_taken_as_linear(monkeypatch):
    printed = [
        {"name": "greedy:8", "num_layers": layers, "cost": {"trace": 1.0, "lower": 0.5, "compile": 1.5 * layers}}
        for layers in (2, 4)
    ]
    monkeypatch.setattr(ladder, "printing", lambda module, stdin: iter(printed))
    question = Question(
        settings=EngineSettings(), target=parse_target("v6e"), chips=1, num_pages=1, names=["greedy:8"], depths=[2, 4]
    )
    said: list[str] = []
    assert costs(question, 32, said.append) == {"greedy:8": Cost(trace=1.0, lower=0.5, compile=48.0)}
    assert said == ["greedy:8 with 2 layers: 4.5 CPU s", "greedy:8 with 4 layers: 7.5 CPU s"]


def test_what_is_said_of_a_sample():
    buckets = [Bucket(8, 8, GREEDY), Bucket(8, 8, SAMPLE)]
    found = {"greedy:8": cost(1, 3), "sample:8": cost(1, 10)}
    said = startup_account.lines(entries(buckets, [], found), buckets, depth=32, depths=[2, 4], num_cores=2)
    assert any("compiled with 2 and 4 layers" in line for line in said)
    assert "7.0 of sample:8 are its sampling, which 1 programs have" in said
    assert said[-1] == (
        "on 2 cores: ready after 11 s, if one core compiles a program; all are traced after 2 s, by the engine"
    )


@pytest.mark.parametrize(
    ("platform", "chips", "steps"), [("tpu", 1, 16), ("tpu", 8, 27), ("gpu", 1, 29), ("cpu", 1, 25)]
)
def test_programs_of_a_server(platform, chips, steps):
    """One TPU draws for the rows in use only, so its prompts need no programs for a few rows."""
    config = bucket_config(EngineSettings(), platform, chips)
    assert len(BucketLadder(config).buckets()) == steps


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--layers", "1", "2", "3"], "--layers 1 2 3: it is one number of layers, or two different ones"),
        (["--layers", "2", "2"], "--layers 2 2"),
        (["--cores", "0"], "--cores 0: it is at least 1"),
        (["--programs", "greedy:7"], "--programs greedy:7: the ladder has "),
        (["--target", "v9:1x1"], "--target v9:1x1"),
    ],
)
def test_flags_that_cannot_be_used(flags, words, capsys, monkeypatch):
    monkeypatch.setattr(startup_account, "obstacle", lambda target, chips: None)
    assert startup.main(["--target", "v6e:1x1", "--model", "1b", "--max-model-len", "512", *flags]) == 2
    assert words in capsys.readouterr().err


def test_flags_of_a_server_come_after_the_dashes(capsys):
    with pytest.raises(SystemExit):
        startup.main(["--model", "1b"])
    assert "unrecognized arguments: --model 1b (flags of scripts/serve come after --)" in capsys.readouterr().err


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
