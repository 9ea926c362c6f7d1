"""The search for a goodput by hand, the workloads of the scenarios, and one scenario from end to end."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from model.loading.source import DEMO_FOLDER
from scripts.lab import scenarios, serving
from scripts.lab.load.arrivals import at_rate
from scripts.lab.load.goodput import MOST_TRIALS, PRECISION, Trial, best_of, find_rate, passes
from scripts.lab.load.scenarios import SCENARIOS, Size
from scripts.lab.load.workload import BenchRequest
from server.api.request.limits import check_text_length
from server.text.tokenizer import ByteLevelTokenizer
from tests.lab.test_peers import SERVER

SIZE = Size(context=1024, seconds=10)


def search(limit: float, start: float = 1.0) -> list[Trial]:
    return find_rate(lambda rate: Trial(rate, {}, rate <= limit), start=start)


@pytest.mark.parametrize("limit", [0.07, 0.9, 1.0, 3.3, 40.0])
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


def test_a_traces_times_are_brought_to_a_rate():
    assert at_rate(np.array([10.0, 11.0, 14.0]), 0.5).tolist() == [0.0, 1.0, 4.0]
    assert at_rate(np.array([10.0, 11.0, 14.0]), 5.0) == pytest.approx([0.0, 0.1, 0.4])
    assert at_rate(np.array([3.0]), 5.0).tolist() == [0.0]


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


def test_texts_come_among_chats_and_are_no_longer_than_a_context_may_be():
    alone, mixed = variants("texts")
    assert [part.name for part in alone.parts] == ["chats"]
    chats, texts = mixed.parts
    assert chats.concurrency == 32
    assert np.diff(texts.arrivals) == pytest.approx([0.2] * 9)
    assert {len(request.prompt) for request in texts.requests} == {12 * SIZE.context}
    tokenizer = ByteLevelTokenizer.from_folder(DEMO_FOLDER)
    check_text_length(12 * SIZE.context, tokenizer, SIZE.context)


def test_a_long_prompt_comes_every_second_among_chats():
    alone, *mixed = variants("long-prompts")
    assert [part.name for part in alone.parts] == ["chats"]
    for variant in mixed:
        chats, long = variant.parts
        assert chats.concurrency == 32
        assert np.diff(long.arrivals).tolist() == [1.0] * 9
        assert {len(request.prompt) for request in long.requests} == {SIZE.context * 7 // 8}


def test_both_caches_get_the_same_prompts_and_only_some_share():
    shared, shared_uncached, distinct, distinct_uncached = (v.parts[0].requests for v in variants("prefix"))
    assert shared == shared_uncached
    assert distinct == distinct_uncached
    num_shared = SIZE.scaled(1500)
    assert len({tuple(request.prompt[:num_shared]) for request in shared}) == 1
    assert len({tuple(request.prompt[:16]) for request in distinct}) == len(distinct)
    assert {len(request.prompt) for request in shared} == {len(request.prompt) for request in distinct}


def test_bursts_have_the_even_arrivals_rate_and_a_tenth_is_urgent():
    even, bursts = (variant.parts[0].arrivals for variant in variants("bursts"))
    assert len(even) == len(bursts) == 20
    assert np.diff(bursts).max() > np.diff(even).max()
    alike, ranked = (variant.parts for variant in variants("priorities"))
    assert len(ranked[1].requests) == 9 * len(ranked[0].requests)
    assert [{r.fields["priority"] for r in part.requests} for part in alike] == [{10}, {10}]
    assert [{r.fields["priority"] for r in part.requests} for part in ranked] == [{0}, {10}]


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
    assert scenarios.main(["prefix", *flags, "--output-json", str(tmp_path / "out.json")]) == 0
    cached, uncached = fast_servers
    assert "--model 'a model'" in cached
    assert [("--no-enable-prefix-caching" in command) for command in (cached, uncached)] == [False, True]
    rows = json.loads((tmp_path / "out.json").read_text())["prefix"]
    assert len(rows) == 4
    assert all(row["completed"] and not row["failed"] for row in rows.values())
    printed = capsys.readouterr().out
    assert "time to the first token, with / without cache (TTFT mean): " in printed


@pytest.mark.parametrize("slos", ["ttft", "speed=3", "ttft=0"])
def test_objectives_of_another_form_are_refused(slos, capsys, free_port):
    flags = ["--base-url", f"http://127.0.0.1:{free_port}", "--model", "m"]
    assert serving.main([*flags, "--find-goodput", slos]) == 2
    assert capsys.readouterr().err.startswith("serving: --find-goodput")
