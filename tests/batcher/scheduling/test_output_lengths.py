from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling import output_lengths
from batcher.scheduling.output_lengths import OutputLengths
from tests.examples import examples

NONE_RUN = np.empty(0, np.int64)


def chance_of_more(lengths: OutputLengths, length: int, running: list[int] | None = None) -> float:
    """The probability that an output is longer than `length` tokens (or its bin)."""
    survival = lengths.survival(np.array(running or [], np.int64))
    return float(survival[lengths.bins(np.array(length))])


def test_without_observations_the_prior_speaks() -> None:
    lengths = OutputLengths(8192)
    for length in (1, 10, 256, 8192):
        assert chance_of_more(lengths, length) == pytest.approx(256 / (256 + length), rel=0.05)


def kaplan_meier(observed: list[tuple[int, bool]], length: int) -> float:
    """The estimate as the definition has it: at each length, the share of those that came so far and went on. Where no
    output came so far, the prior's share."""
    chance = 1.0
    for at in range(1, length + 1):
        deaths = sum(stopped and n == at for n, stopped in observed)
        # One that was cut off at this very length is not known to have been able to stop at it.
        came = sum(n > at or (stopped and n == at) for n, stopped in observed)
        chance *= 1 - deaths / came if came else (256 + at - 1) / (256 + at)
    return chance


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(1, 16), st.booleans()), min_size=1, max_size=40),
    st.lists(st.integers(0, 15), max_size=10),
    st.integers(1, 16),
)
def test_it_is_the_kaplan_meier_estimate(observed: list[tuple[int, bool]], running: list[int], length: int) -> None:
    """Without prior and without ageing; lengths up to 16 have a bin each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_lengths, "_PRIOR_WEIGHT", 1e-12)
        patch.setattr(output_lengths, "_MEMORY", 1e12)
        lengths = OutputLengths(16)
        for n, stopped in observed:
            lengths.observe(n, stopped=stopped)
        everybody = [*observed, *((n, False) for n in running)]
        assert chance_of_more(lengths, length, running) == pytest.approx(kaplan_meier(everybody, length), abs=1e-6)


def test_answers_that_were_cut_off_say_nothing_about_longer_ones() -> None:
    lengths = OutputLengths(131072)
    for _ in range(20):
        lengths.observe(16, stopped=False)
    assert chance_of_more(lengths, 15) > 0.95
    # From there on it is the prior again.
    further = chance_of_more(lengths, 1024) / chance_of_more(lengths, 16)
    assert further == pytest.approx((256 + 16) / (256 + 1024), rel=0.05)


def test_running_requests_that_outlive_the_past_are_believed() -> None:
    lengths = OutputLengths(8192)
    for _ in range(300):
        lengths.observe(20, stopped=True)
    short = chance_of_more(lengths, 21)
    assert short < 0.05
    assert chance_of_more(lengths, 21, [200] * 100) > 4 * short


def test_a_change_of_regime_is_learned() -> None:
    lengths = OutputLengths(8192)
    for length in [20] * 1000 + [800] * 1000:
        lengths.observe(length, stopped=True)
    assert chance_of_more(lengths, 400) > 0.9


def test_more_than_the_longest_counts_as_the_longest() -> None:
    lengths = OutputLengths(100)
    lengths.observe(5000, stopped=True)
    assert lengths.bins(np.array([100, 101, 10**9])).tolist() == [lengths.bins(np.array(100))] * 3
    assert (lengths.survival(np.array([10**6])) > 0).all()
    assert (np.diff(lengths.survival(NONE_RUN)) <= 0).all()
