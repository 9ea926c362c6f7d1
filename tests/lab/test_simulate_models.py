"""Several models in simulated time: in one engine, in processes that sleep, and apart."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from batcher.step_times import PerTokenEstimate
from scripts.lab import plan, simulate
from scripts.lab.planning import fleets
from scripts.lab.simulation.machine import Machine, SimulatedRequest
from scripts.lab.simulation.machine import simulate as run
from scripts.lab.simulation.models import Fleet, among, apart, asleep, together
from tests.lab.test_simulate import cells

COST = PerTokenEstimate(0.01, 0.0)  # each step
MACHINE = Machine(cost=COST, page_size=64, num_pages=2048, max_models=3, bring_s=1.0)
ONE = replace(MACHINE, max_models=0)
NUM_TOKENS = 20


def chats(*models: int, every_s: float = 0.0) -> list[SimulatedRequest]:
    return [
        SimulatedRequest(arrival_s=i * every_s, num_prompt=64, num_output=NUM_TOKENS, model=model)
        for i, model in enumerate(models)
    ]


def test_requests_name_the_models_evenly_or_by_zipfs_law() -> None:
    requests = chats(*[0] * 7000)
    evenly, by_zipf = (Counter(r.model for r in among(requests, 7, zipf=zipf)) for zipf in (0.0, 1.1))
    assert all(abs(count - 1000) < 120 for count in evenly.values())
    total = sum(1 / k**1.1 for k in range(1, 8))
    assert all(abs(by_zipf[k - 1] - 7000 / k**1.1 / total) < 150 for k in range(1, 8))
    assert [r.arrival_s for r in among(requests, 7)] == [r.arrival_s for r in requests]


@pytest.mark.parametrize(("models", "steps"), [((0, 0), NUM_TOKENS), ((0, 1), 2 * NUM_TOKENS)])
def test_models_on_the_device_take_turns_of_a_step(models: tuple[int, ...], steps: int) -> None:
    """Two requests of one model share each step. Those of two models do not, after the second one has come."""
    result = run(chats(*models), replace(MACHINE, bring_s=0.0))
    assert abs(result.num_steps - steps) <= 3  # surplus steps that were in flight at the ends
    assert result.output_tokens == 2 * NUM_TOKENS
    assert result.num_brought == len({*models} - {0})


def test_others_run_while_a_model_comes_and_arrivals_are_served_meanwhile() -> None:
    requests = [replace(chats(model)[0], arrival_s=at) for model, at in ((1, 0.0), (0, 0.5), (2, 0.6))]
    cold, warm, last = sorted(run(requests, MACHINE).served, key=lambda each: each.arrived_s)
    assert warm.first_s == pytest.approx(0.51) and warm.last_s < 1.0
    assert cold.first_s == pytest.approx(1.01)
    assert last.first_s >= 2.0  # one comes after the other


def test_a_model_leaves_for_another_one_no_sooner_than_its_bringing_allows() -> None:
    """With one place besides model 0, a model stays for nine times as long as it took to come, if it has requests."""
    long = [replace(request, num_output=3000) for request in chats(1)]
    result = run([*long, *chats(2)], replace(MACHINE, max_models=2))
    second = min(result.served, key=lambda each: each.num_output)
    assert second.first_s == pytest.approx(1.0 + 9.0 + 1.0 + 0.01, abs=0.05)
    assert result.num_brought == 3  # the first one comes back


def test_a_process_that_sleeps_costs_its_copy_and_the_drain() -> None:
    first, second = asleep(chats(0, 1, every_s=0.05), ONE, 2, wake_s=1.0, turn_s=0.0).served
    drained = NUM_TOKENS * 0.01
    assert first.last_s == pytest.approx(drained)
    assert second.first_s == pytest.approx(drained + 1.0 + 0.01)
    fleet = asleep(chats(0, 1, 0, every_s=0.05), ONE, 2, wake_s=1.0, turn_s=0.0)
    assert fleet.num_changes == 2 and max(each.last_s for each in fleet.served) > 2.0
    fleet = asleep(chats(0, 1, 0, every_s=0.05), ONE, 2, wake_s=1.0, turn_s=0.15)  # the third one is still taken
    assert fleet.num_changes == 1


@pytest.mark.parametrize("turn_s", [0.0, 0.3, 5.0])
def test_each_way_serves_every_request_once_with_all_its_tokens(turn_s: float) -> None:
    requests = among(chats(*[0] * 60, every_s=0.03), 4)
    lost = [replace(MACHINE, max_models=places) for places in (2, 3, 4)]
    fleets = [together(requests, machine) for machine in lost]
    fleets += [apart(requests, ONE, 4), asleep(requests, ONE, 4, wake_s=0.2, turn_s=turn_s)]
    for fleet in fleets:
        assert sorted(each.arrived_s for each in fleet.served) == [request.arrival_s for request in requests]
        assert {each.num_output for each in fleet.served} == {NUM_TOKENS}
        assert all(each.first_s > each.arrived_s for each in fleet.served)


def test_the_share_within_targets_by_hand() -> None:
    first, second = run(chats(0, 0, every_s=10.0), ONE).served
    late = replace(second, first_s=second.first_s + 3.0, last_s=second.last_s + 3.0)
    fleet = Fleet(served=[first, late])
    assert fleet.share_within(2.0, 0.1) == 0.5
    assert fleet.share_within(4.0, 0.1) == 1.0
    assert fleet.share_within(4.0, 0.001) == 0.0
    assert fleet.percentiles(50)[0] == [pytest.approx(0.01 + 1.5)]


def test_the_command_compares_the_ways_per_chip(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one rate: a search takes minutes."""
    monkeypatch.setattr(simulate, "LEAST_REQUESTS", 12)
    monkeypatch.setattr(fleets, "find_rate", lambda attempt, start: [attempt(start)])
    flags = ["--models", "3", "--targets", "h200", "--seconds", "10", "--resident", "0", "3", "--share", "0.1"]
    assert simulate.main(flags) == 0
    rows = cells(capsys.readouterr().out)
    assert [row[1] for row in rows] == ["evenly"] * 3 + ["Zipf"] * 3
    assert [row[2] for row in rows] == ["one engine, 3 of 3 on the device", "3 processes that sleep", "3 chips"] * 2
    assert [(row[3], row[4]) for row in rows] == [("1", "0.500"), ("1", "0.500"), ("3", "1.500")] * 2
    assert all(float(row[6]) == pytest.approx(0.5 * float(row[5].rstrip("%")) / 100, abs=0.01) for row in rows)


# --- the planner ---

FLAGS = ["--model", "preset:llama-3.1-8b", "--target", "h100", "--max-model-len", "8192"]


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert plan.main([*FLAGS, "--no-compile", *flags]) == 0
    return capsys.readouterr().out


def test_a_plan_counts_the_models_on_the_device_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    weights = 8_030_261_248 * 2
    report = planned(capsys, "--num-models", "7", "--max-resident-models", "3")
    found = {name: float(gib) for gib, name in re.findall(r"([\d.]+) GiB  ([a-zA-Z /]+)", report)}
    assert found["weights of other models "] == pytest.approx(2 * weights / 2**30, abs=0.01)
    usable = 80 * 0.92 * 0.9
    assert usable - 0.6 < found["of each chip"] <= usable
    assert "7 models, 3 on the device at once" in report
    assert f"in {weights / 64e9:.2f} s at 64 GB/s, which was not measured" in report
    alone, two = planned(capsys), planned(capsys, "--num-models", "7")
    assert "other models" not in alone and "at once: the others" not in alone
    assert "7 models, 2 on the device at once" in two  # the others would take more than half of the pages
    rooms = [int(re.search(r"room for (\d+) tokens", text)[1]) for text in (alone, two, report)]
    assert rooms[1] - rooms[2] == pytest.approx(weights / 2**17, rel=0.02)  # 128 KiB a token


@pytest.mark.usefixtures("short_simulations")
def test_a_plan_simulates_several_models_and_names_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--workload", "500/50", "--request-rate", "2", "--max-num-seqs", "64", "--max-num-batched-tokens", "1024"]
    report = planned(capsys, *load, "--num-models", "3", "--max-resident-models", "3", "--json")
    assert "--models NAME1=PATH1 NAME2=PATH2 --max-resident-models 3" in report
    reports = report, planned(capsys, *load, "--json")
    several, one = (json.loads(text)["best"]["latencies_ms"]["tpot"]["p50"] for text in reports)
    assert several > one


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-models", "1"], "--num-models 1: it is at least 2"),
        (["--num-models", "3", "--models", "a=b"], "in place of --models"),
        (["--num-models", "3", "--workload", "chat", "--no-simulate"], "several models are simulated"),
        (["--num-models", "7", "--max-resident-models", "5"], "weights of 4 other models (--max-resident-models)"),
    ],
)
def test_a_plan_of_models_that_cannot_be_made_is_refused(flags, words, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*FLAGS, "--no-compile", *flags]) == 2
    assert words in capsys.readouterr().err
