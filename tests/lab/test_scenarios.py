"""The search for a goodput by hand, the workloads of the scenarios, and one scenario from end to end."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from batcher.request import Targets
from scripts.lab import scenarios
from scripts.lab.load.client import Outcome
from scripts.lab.load.goodput import MOST_TRIALS, PRECISION, Trial, best_of, find_rate, passes
from scripts.lab.load.scenarios import SCENARIOS, Size
from scripts.lab.load.workload import BenchRequest
from tests.lab.test_peers import SERVER

SIZE = Size(context=1024, seconds=10)


def search(limit: float, start: float = 1.0) -> list[Trial]:
    return find_rate(lambda rate: Trial(rate, {}, rate <= limit), start=start)


@pytest.mark.parametrize("limit", [0.07, 1.0, 40.0])
@pytest.mark.parametrize("start", [0.5, 8.0])
def test_the_rate_found_is_just_below_the_servers(limit, start):
    trials = search(limit, start)
    best = best_of(trials)
    assert best.rate <= limit
    assert min(trial.rate for trial in trials if not trial.passed) <= best.rate * PRECISION
    assert len({trial.rate for trial in trials}) == len(trials) <= MOST_TRIALS


def test_a_search_ends_where_every_rate_passes_and_where_none_does():
    assert best_of(search(0.0)) is None
    assert best_of(search(float("inf"))).rate == 2.0 ** (MOST_TRIALS - 1)
    assert len(search(0.0)) == len(search(float("inf"))) == MOST_TRIALS


def test_failed_requests_meet_no_objective():
    assert passes({"completed": 9, "failed": 1, "goodput": {"requests": 9}}, share=0.9)
    assert not passes({"completed": 9, "failed": 2, "goodput": {"requests": 9}}, share=0.9)
    assert not passes({"completed": 0, "failed": 0, "goodput": {"requests": 0}}, share=0.9)


def variants(name: str):
    scenario = SCENARIOS[name]
    found = scenario.variants(SIZE, 4.0, np.random.default_rng(0))
    assert {variant.server for variant in found} == scenario.servers(SIZE).keys()
    return found


def num_tokens(request: BenchRequest) -> int:
    return request.fields.get("truncate_prompt_tokens", len(request.prompt))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_request_fits_the_context_and_every_ratio_its_rows(name):
    found = variants(name)
    for variant in found:
        for part in variant.parts:
            assert all(num_tokens(r) + r.max_tokens <= SIZE.context for r in part.requests)
            assert (part.arrivals is None) != (part.concurrency is None)
            assert part.arrivals is None or len(part.arrivals) == len(part.requests)
    rows = {v.name if len(v.parts) == 1 else f"{v.name}, {part.name}" for v in found for part in v.parts}
    assert {row for ratio in SCENARIOS[name].ratios for row in ratio[2:]} <= rows


@pytest.fixture
def fast_servers(tmp_path, monkeypatch):
    """In place of real ones: they answer at once, in as many chunks as are asked for."""
    (tmp_path / "server.py").write_text(SERVER)
    serving = scenarios.serving
    started = []

    def serve(name, command, port, *, timeout_s):
        started.append(command)
        return serving(name, f"{sys.executable} {tmp_path}/server.py {port} nothing", port, timeout_s=timeout_s)

    monkeypatch.setattr(scenarios, "serving", serve)
    return started


def test_a_scenario_from_its_servers_to_its_table(fast_servers, tmp_path, capsys, free_port):
    flags = ["--seconds", "0.2", "--context", "256", "--port", str(free_port), "--model", "a model"]
    flags += ["--peer", f"a peer=http://127.0.0.1:{free_port}"]
    assert scenarios.main(["prefix", *flags, "--output-json", str(tmp_path / "out.json")]) == 0
    cached, uncached = fast_servers
    assert "--model 'a model'" in cached
    assert [("--no-enable-prefix-caching" in command) for command in (cached, uncached)] == [False, True]
    rows = json.loads((tmp_path / "out.json").read_text())["prefix"]
    assert len(rows) == 5 and "a peer" in rows
    assert all(row["completed"] and not row["failed"] for row in rows.values())
    printed = capsys.readouterr().out
    assert "time to the first token, with / without cache (TTFT mean): " in printed


def test_requests_within_targets_by_hand():
    """A request of 100 gaps may have one that is late; one without a token failed."""
    on_time = Outcome(start=1.0, chunk_times=[1.5 + 0.02 * i for i in range(101)])
    once_late = replace(on_time, chunk_times=[*on_time.chunk_times[:-1], 99.0])
    twice_late = replace(on_time, chunk_times=[*on_time.chunk_times[:-2], 98.0, 99.0])
    begins_late = replace(on_time, start=0.9)
    failed = Outcome(start=1.0, error="no")
    targets = Targets(ttft_ms=550, itl_ms=50)
    shares = [scenarios.within([each], targets) for each in (on_time, once_late, twice_late, begins_late, failed)]
    assert shares == [1, 1, 0, 0, 0]
