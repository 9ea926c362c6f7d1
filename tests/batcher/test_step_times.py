"""The table of step times."""

from __future__ import annotations

import pytest

from batcher.step_times import StepTimes


def test_entries_are_met_and_lines_join_them():
    times = StepTimes(num_tokens=(2, 4, 8), times=(10, 12, 20))
    assert [times(n) for n in (2, 3, 4, 6, 8, 10)] == [10, 11, 12, 16, 20, 24]
    assert times(1) == 9  # before the first entry, at the first pace


@pytest.mark.parametrize(
    ("tokens", "times"), [((1,), (1.0,)), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((1, 1), (1, 1))]
)
def test_a_table_that_tells_no_times_is_refused(tokens, times):
    with pytest.raises(ValueError, match="table"):
        StepTimes(num_tokens=tokens, times=times)
