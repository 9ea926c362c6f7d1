"""Which parts of a stored array a chip takes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.loading.parts import Parts


@given(tensors=st.lists(st.sampled_from([4, 8, 12]), min_size=1, max_size=3), axis=st.integers(0, 1), data=st.data())
def test_a_chip_gets_its_share_of_every_tensor_in_as_few_reads_as_there_are_runs(tensors, axis, data):
    chips = data.draw(st.sampled_from([1, 2, 4]))
    sizes = [3, 5]
    parts = Parts(axis=axis, tensors=tuple(tensors), shape=tuple(sizes))
    sizes[axis] *= sum(tensors)
    whole = np.arange(np.prod(sizes)).reshape(sizes)
    bounds = np.cumsum(tensors)[:-1] * parts.shape[axis]
    shares = [np.split(tensor, chips, axis) for tensor in np.split(whole, bounds, axis)]
    stack = parts.stacked(whole)
    for chip in range(chips):
        ranges = parts.of_chip(chip, chips)
        read = parts.joined([stack[numbers.start : numbers.stop] for numbers in ranges])
        np.testing.assert_array_equal(read, np.concatenate([share[chip] for share in shares], axis))
        assert len(ranges) == (1 if chips == 1 else len(tensors))


def test_chips_that_share_a_head_take_the_same_parts():
    parts = Parts(axis=0, tensors=(8, 2, 2), shape=(4, 16))
    assert parts.of_chip(0, 1) == [range(12)]
    assert parts.of_chip(1, 2) == [range(4, 8), range(9, 10), range(11, 12)]
    assert parts.of_chip(6, 8) == [range(6, 7), range(9, 10), range(11, 12)]
    assert parts.of_chip(7, 8) == [range(7, 8), range(9, 10), range(11, 12)]
