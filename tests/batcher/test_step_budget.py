"""A step's budget in estimated time: what fits, and what the scheduler makes of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.config import EngineConfig
from batcher.long_prompts import LongPrompts
from batcher.step_budget import StepBudget
from tests.batcher.harness import EOS, Drive, make_capacity, make_request

CAPACITY = make_capacity(max_model_len=256, num_pages=256)


@given(
    even=st.one_of(st.just(math.inf), st.floats(0.5, 1e6)),
    past=st.integers(0, 200_000),
    most=st.integers(1, 300),
    time=st.floats(0, 1000),
)
def test_as_many_tokens_fit_as_cost_no_more(even: float, past: int, most: int, time: float) -> None:
    budget = StepBudget(tokens=100, even_context=even)
    count = budget.fitting(past, most, time)
    fits = [n for n in range(1, most + 1) if n + (past * n + n * n / 2) / even <= time]
    slack = 1e-9 * time  # a sum that is equal in exact numbers may round either way
    assert 0 <= count <= most
    assert count == 0 or budget.cost(past, count) <= time + slack
    assert count == most or budget.cost(past, count + 1) > time - slack
    assert count in (len(fits) - 1, len(fits), len(fits) + 1)


def test_without_attention_a_budget_counts_tokens() -> None:
    budget = StepBudget(tokens=32)
    assert (budget.time, budget.fitting(10**6, 50, 32), budget.fitting(10**6, 5, 32)) == (32, 32, 5)


def chunks_of(**config: object) -> list[list[tuple[int, int]]]:
    """(start, tokens) of each step's chunks, for two prompts of 200 tokens next to a stream."""
    drive = Drive(CAPACITY, prefix_caching=False, **config)
    steps: list[list[tuple[int, int]]] = []
    make = drive.scheduler._plan_ones

    def spy(*args: object) -> object:
        plan = make(*args)
        steps.append([(chunk.start, chunk.count) for chunk in plan.chunks])
        return plan

    drive.scheduler._plan_ones = spy
    drive.add(make_request("stream", [5] * 4, max_tokens=60, ignore_eos=True))
    for name in "ab":
        drive.add(make_request(name, [ord(name)] * 200, max_tokens=2))
    drive.finish()
    drive.check_outputs()
    return [chunks for chunks in steps if chunks]


def test_later_chunks_are_shorter_and_none_costs_more_than_the_first() -> None:
    even = 50.0
    budget = StepBudget(tokens=32, even_context=even)
    steps = chunks_of(even_context=even)
    for chunks in steps:
        assert (
            sum(budget.cost(start, count) for start, count in chunks) <= budget.time or len(chunks) == 1 == chunks[0][1]
        )
    counts = [count for chunks in steps for start, count in chunks if count > 1]
    assert max(counts) > 2 * counts[len(counts) // 2]
    assert len(steps) > len(chunks_of())


def test_a_context_so_long_that_nothing_fits_goes_on_token_by_token() -> None:
    steps = chunks_of(even_context=1.0)
    assert all(sum(count for _, count in chunks) for chunks in steps)
    assert any(chunks == [(start, 1)] for chunks in steps for start, _ in chunks)


def test_a_threshold_leaves_the_rest_of_the_time_to_others() -> None:
    """Otherwise a long prompt's chunk late in its context would take the whole step."""
    steps = chunks_of(even_context=50.0, long_prompts=LongPrompts(threshold=16))
    late = [chunks for chunks in steps if 100 < chunks[0][0] < 180]
    assert late and sum(len(chunks) == 2 for chunks in late) > len(late) / 2


@pytest.mark.parametrize("even_context", [0.0, -1.0, math.nan])
def test_attention_costs_something(even_context: float) -> None:
    with pytest.raises(ValueError, match="attention costs some time"):
        EngineConfig(eos_token_ids=EOS, even_context=even_context)
