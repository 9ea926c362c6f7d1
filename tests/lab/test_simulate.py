"""Admission policies in simulated time: what the forecast must not cost."""

from __future__ import annotations

import pytest

from scripts.lab import simulate
from scripts.lab.simulation.machine import Machine

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


def test_thresholds_of_long_prompts_are_compared_with_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--long-prompts", "1024", "--num-requests", "40"]) == 0
    rows = cells(capsys.readouterr().out)
    assert [row[1] for row in rows] == ["none", "1024"] * 2
    ttft = [float(row[4].split("/")[1]) for row in rows]
    assert ttft[1] < ttft[0] / 2  # of short prompts behind a long one


def test_a_budget_of_time_bounds_steps_behind_long_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    """And changes nothing where no context is long."""
    assert simulate.main(["--long-prompts", "1024", "--num-requests", "60", "--even-context", "26600"]) == 0
    rows = cells(capsys.readouterr().out)
    assert [row[2] for row in rows] == ["tokens", "time"] * 6
    itl = {tuple(row[:3]): float(row[5].split("/")[1]) for row in rows}
    among = "chats among prompts of 100,000"
    for threshold in ("none", "1024"):
        assert itl[among, threshold, "time"] < itl[among, threshold, "tokens"] / 2
        assert itl["chats alone", threshold, "time"] <= itl["chats alone", threshold, "tokens"]
