"""Prefill apart from decode in simulated time, and what a plan says of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from batcher.step_times import PerTokenEstimate
from scripts.lab import plan
from scripts.lab.simulation.apart import simulate_apart
from scripts.lab.simulation.machine import Machine, SimulatedRequest, simulate

MACHINE = Machine(cost=PerTokenEstimate(0.01, 0.0001), page_size=64, num_pages=2048)


def chats(count: int, every_s: float) -> list[SimulatedRequest]:
    return [SimulatedRequest(arrival_s=i * every_s, num_prompt=1600 + i, num_output=20) for i in range(count)]


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 1), (1, 3)])
def test_every_request_is_served_once_with_all_its_tokens(num_prefill, num_decode):
    requests = chats(30, 0.05)
    result = simulate_apart(requests, MACHINE, num_prefill=num_prefill, num_decode=num_decode, page_s=0.001)
    assert sorted(times.num_prompt for times in result.served) == [request.num_prompt for request in requests]
    assert result.output_tokens == 30 * 20 and len(result.ttft) == 30
    assert sorted(times.arrived_s for times in result.served) == [request.arrival_s for request in requests]


def test_one_request_takes_the_prompt_the_pages_and_its_rest():
    (request,) = chats(1, 0)
    alone = simulate([replace(request, num_output=1, max_tokens=1)], MACHINE).seconds
    last = 0.01 + 0.0001 * 64  # 1,600 tokens are 25 pages, of which the last token is computed
    (ttft,) = simulate_apart([request], MACHINE, num_prefill=1, num_decode=1, page_s=0.001).ttft
    assert ttft == pytest.approx(alone + 24 * 0.001 + last)


def test_decodes_do_not_pause_for_prompts():
    requests = [replace(request, num_output=60) for request in chats(30, 0.2)]
    together = simulate(requests[::2], MACHINE)
    apart = simulate_apart(requests, MACHINE, num_prefill=1, num_decode=1, page_s=0.0001)
    assert apart.worst_itl < together.worst_itl / 5


@pytest.mark.usefixtures("short_simulations")
def test_a_plan_shows_both_layouts(capsys):
    flags = ["--model", "8b", "--target", "4xh100", "--workload", "2000/50", "--request-rate", "8", "--no-compile"]
    flags += ["--max-num-seqs", "64", "--max-num-batched-tokens", "2048", "--tensor-parallel-size", "1"]
    assert plan.main([*flags, "--prefill-apart", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["apart"]
    assert [(layout["num_prefill"], layout["num_decode"]) for layout in found] == [(1, 3), (2, 2), (3, 1)]
    assert all(layout["latencies"]["ttft_ms"]["p95"] > 0 for layout in found)
    assert plan.main([*flags, "--prefill-apart"]) == 0
    assert capsys.readouterr().out.count("(all together)") == 3


def test_one_replica_cannot_be_divided(capsys):
    flags = ["--model", "8b", "--target", "1xh100", "--workload", "2000/50", "--request-rate", "2", "--no-compile"]
    assert plan.main([*flags, "--max-num-seqs", "64", "--max-num-batched-tokens", "2048", "--prefill-apart"]) == 2
    assert "--prefill-apart: the best settings have one replica" in capsys.readouterr().err
    assert plan.main(["--model", "8b", "--prefill-apart"]) == 2
    assert "--prefill-apart needs --workload" in capsys.readouterr().err
