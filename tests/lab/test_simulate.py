"""Policies in simulated time: what the forecast must not cost, and what targets must gain."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from batcher.request import Targets
from batcher.step_times import PerTokenEstimate
from scripts.lab import plan, simulate
from scripts.lab.load.lengths import Trace
from scripts.lab.simulation import goodput
from scripts.lab.simulation.loads import CONTEXT, agents, loads
from scripts.lab.simulation.machine import Machine, SimulatedRequest
from scripts.lab.simulation.machine import simulate as simulated
from scripts.lab.simulation.policies import Feedback, PrefillPressure

SMALL = Machine(max_model_len=4096, num_pages=512, page_size=16)  # 8,192 tokens


@pytest.fixture(scope="module")
def mixed_limits() -> simulate.Row:
    """200 chats, of which every second is cut off at 16 tokens, in a pool that holds about a dozen at a time."""
    prompts, outputs = simulate.lengths("conversation", 200, None)
    requests = simulate.backlog(prompts // 4, outputs * 2, limit="mixed", max_model_len=4096)
    return simulate.compare(requests, SMALL)


def test_pages_do_not_lie_idle_where_limits_are_mixed(mixed_limits: simulate.Row) -> None:
    steps = {name: result.num_steps for name, result in mixed_limits.items()}
    assert steps["forecast"] <= 1.05 * steps["admit if free"]
    assert steps["forecast"] <= 1.05 * steps["clairvoyant"]


def test_the_forecast_saves_preemptions(mixed_limits: simulate.Row) -> None:
    assert mixed_limits["admit if free"].num_preemptions >= 5
    assert mixed_limits["forecast"].num_preemptions <= mixed_limits["admit if free"].num_preemptions // 3
    assert mixed_limits["clairvoyant"].num_preemptions == 0


def test_all_policies_give_every_token(mixed_limits: simulate.Row) -> None:
    assert len({result.output_tokens for result in mixed_limits.values()}) == 1


def test_short_limited_answers_do_not_hold_up_long_chats() -> None:
    machine = Machine(max_model_len=131072, num_pages=8192, page_size=64)
    row = simulate.compare(simulate.chats_after_short_answers(), machine)
    assert row["forecast"].num_steps <= 1.03 * row["admit if free"].num_steps
    assert row["forecast"].num_preemptions == 0


def cells(printed: str) -> list[list[str]]:
    """Of a table's rows."""
    _, _, *lines = [line for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


SMALL_SWEEP = ("--seqs", "64", "256", "--tokens", "512", "2048", "--num-requests", "256")


def rates(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, float]:
    """Policy -> requests/s of the one table."""
    assert simulate.main(["--chips", "h100", *SMALL_SWEEP, *flags]) == 0
    return {row[0]: float(row[3]) for row in cells(capsys.readouterr().out)}


def test_targets_hold_the_rate_of_the_best_static_pair_and_more_than_the_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = rates(capsys, "--loads", "conversation", "--policies", "targets", "default")
    assert found["targets"] * goodput.PRECISION >= found[goodput.BEST] > 0
    assert found["targets"] > 1.3 * found["default"]


def test_targets_hold_a_rate_at_which_longer_steps_would_use_up_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the weights of an 8B, a v6e has pages for 95,000 tokens. The best static budget is 512 tokens."""
    aims = Targets(ttft_ms=500, itl_ms=50)
    machine, policy = simulate.machines("v6e"), goodput.policies(aims)[goodput.TARGETS]
    bench = goodput.Bench(draw=loads({})["conversation"], count=256, machine=machine, targets=aims)
    assert bench.at(policy, 9.9, ends_early=True).keeps_targets
    monkeypatch.setattr("batcher.scheduling.targets._PAGES_HELD", np.inf)
    assert not bench.at(policy, 9.9, ends_early=True).keeps_targets


@pytest.mark.usefixtures("short_simulations")
def test_a_plan_and_the_comparison_find_the_same_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """The planner draws as many requests as the comparison is told."""
    targets = ["--target-ttft", "500", "--target-itl", "50"]
    context = ["--max-model-len", str(CONTEXT), "--no-compile"]
    assert plan.main(["--model", "8b", "--target", "h100", "--workload", "chat", "--json", *targets, *context]) == 0
    planned = json.loads(capsys.readouterr().out)
    found = rates(capsys, "--loads", "chat", "--policies", "targets", *targets)["targets"]
    rate = planned["best"]["offered_requests_per_s"]
    assert rate == pytest.approx(found, abs=0.005)
    assert planned["holds"] == f"h100 holds {rate:.1f} requests/s within 50/500 ms (ITL/TTFT, p99)"
    assert " --target-itl 50 --target-ttft 500 " in planned["command"]
    assert "--max-num-seqs" not in planned["command"]


def test_a_run_that_ends_early_has_the_verdict_of_the_whole_run() -> None:
    draw, targets = loads({})["bursts"], Targets(ttft_ms=500, itl_ms=60)
    verdicts = set()
    for rate in (0.5, 4.0, 40.0):
        whole, part = (
            simulated(draw(60, rate), Machine(), targets=targets, ends_early=early) for early in (False, True)
        )
        assert whole.keeps_targets == part.keeps_targets
        assert (len(part.served) == 60) == whole.keeps_targets
        verdicts.add(whole.keeps_targets)
    assert verdicts == {True, False}


def test_the_pauses_and_waits_that_are_late_are_counted_by_hand() -> None:
    """A step of 100 ms: the second prompt comes in the middle of one, and waits for it and for its own."""
    machine = Machine(cost=PerTokenEstimate(0.1, 0.0))
    requests = [SimulatedRequest(arrival_s=at, num_prompt=8, num_output=5) for at in (0.0, 0.25)]
    result = simulated(requests, machine, targets=Targets(ttft_ms=110, itl_ms=99))
    assert result.num_late == 8
    assert result.num_late_first == sum(ttft > 0.11 for ttft in result.ttft) == 1
    assert result.num_within == 0
    assert simulated(requests, machine, targets=Targets(ttft_ms=110, itl_ms=101)).num_within == 1
    own = [replace(request, ttft_ms=400.0) for request in requests]
    assert simulated(own, machine, targets=Targets(ttft_ms=110, itl_ms=101)).num_within == 2


@pytest.mark.parametrize("name", loads({}))
def test_loads_arrive_in_order_at_their_rate(name: str) -> None:
    requests = loads({})[name](400, 8.0)
    times = np.array([request.arrival_s for request in requests])
    assert len(requests) == 400 and (np.diff(times) >= 0).all()
    assert 400 / times[-1] == pytest.approx(8.0, rel=0.5)  # a few bursts are not exactly their mean
    assert max(request.num_prompt + request.num_output for request in requests) <= CONTEXT


def test_agents_come_back_with_their_history() -> None:
    first, *later = [request for request in agents(400, 2.0) if request.prefix == 20]
    for before, request in zip((first, *later), later, strict=False):
        assert 2.0 <= request.arrival_s - before.arrival_s <= 6.0
        assert request.num_prompt > before.num_prompt + before.num_output
        assert request.num_shared == request.num_prompt


def test_a_trace_keeps_its_lengths_and_the_shape_of_its_arrivals() -> None:
    trace = Trace(np.array([0.0, 1.0, 1.5, 4.0]), np.array([5, 6, 7, 8]), np.array([1, 2, 3, 4]))
    requests = loads({"code": trace})["code"](4, 1.5)
    assert [(r.arrival_s, r.num_prompt, r.num_output) for r in requests] == [
        (0, 5, 1),
        (0.5, 6, 2),
        (0.75, 7, 3),
        (2, 8, 4),
    ]


def test_budgets_that_adapt() -> None:
    """Steps of a prompt alone have the whole budget; beside decodes P-PAS takes the smaller one for two prompts, and a
    feedback less after each long pause."""
    short, long = (
        SimulatedRequest(arrival_s=at, num_prompt=num, num_output=80) for at, num in ((0.0, 100), (0.1, 30_000))
    )
    machine = Machine(max_num_batched_tokens=4096, max_model_len=32_768, cost=PerTokenEstimate(0.005, 0.00002))
    smaller = 0.005 + 512 * 0.00002
    for requests, least, most in (([short, long], 0, 0), ([short, long, long], 50, 70)):
        pauses = np.array(simulated(requests, machine, adapt=PrefillPressure(512, 4096)).itl)
        assert max(pauses) == pytest.approx(0.005 + 4096 * 0.00002)
        assert least <= np.isclose(pauses, smaller).sum() <= most
    followed = simulated([short, long], machine, adapt=Feedback(0.03, 64, 4096)).itl
    assert max(followed) > 0.05 and np.median(followed[-40:]) < 0.03
