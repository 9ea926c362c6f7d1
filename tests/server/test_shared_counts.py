"""The counts that all HTTP processes see."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.shared_counts import (
    _REST_MASK,
    MOST_ENGINES,
    NUM_WORDS,
    PROMISED,
    WAYS,
    Load,
    PrefixTable,
    Row,
    SharedCounts,
)

# Digests that differ in further bits only are taken for the same.
DIGESTS = st.integers(0, (_REST_MASK + 1) * (NUM_WORDS // WAYS) - 1)


def write(counts: SharedCounts) -> None:
    row = Row(counts, 1)
    row.set_in_flight(5)
    row.set_open(1, 7)
    row.set_queued(1, 900)
    row.change_key(0, 2)
    PrefixTable(counts).put(3, 1, 9)
    PrefixTable(counts).put(4, 1, 8)
    PrefixTable(counts).evicted(1, 9)


def test_another_process_writes_what_this_one_reads():
    counts = SharedCounts.made(2, 2, 1)
    process = multiprocessing.get_context("spawn").Process(target=write, args=(counts,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    row = Row(counts, 0)
    row.set_in_flight(1)
    row.set_open(0, 2)
    assert (row.in_flight, row.loads(), row.change_key(0, 1)) == (6, [Load(2, 0), Load(7, 900)], 3)
    assert (PrefixTable(counts).get(3), PrefixTable(counts).get(4)) == ({1: 9}, {})
    counts.clear(1)
    assert (row.in_flight, row.loads(), row.change_key(0, 0)) == (1, [Load(2, 0), Load(0, 0)], 1)


@given(
    st.lists(st.tuples(DIGESTS, st.integers(0, MOST_ENGINES - 1), st.integers(1, 100)), max_size=WAYS),
    DIGESTS,
    st.integers(0, 100),
)
def test_a_digest_is_found_with_the_engines_that_have_it_and_their_last_use(puts, other, horizon):
    """As in a dictionary, as long as no row is full."""
    prefixes = PrefixTable(SharedCounts.made(1, 2, 0))
    expected: dict[int, dict[int, int]] = {other: {}}
    for digest, engine, used in puts:
        prefixes.put(digest, engine, used)
        expected.setdefault(digest, {})[engine] = used
    assert {digest: prefixes.get(digest) for digest in expected} == expected
    for engine in {engine for engines in expected.values() for engine in engines}:
        prefixes.evicted(engine, horizon)
        prefixes.evicted(engine, horizon // 2)  # what is known already
    for digest, engines in expected.items():
        assert prefixes.get(digest) == {engine: used for engine, used in engines.items() if used >= horizon}
    prefixes.put(other, 0, PROMISED)
    assert prefixes.get(other).get(0) == PROMISED
    prefixes.clear()
    assert all(prefixes.get(digest) == {} for digest in expected)


@given(st.lists(st.integers(0, 3 * WAYS), max_size=100))
def test_a_full_row_keeps_what_was_written_last(numbers):
    prefixes = PrefixTable()
    for number in numbers:  # all in one row
        prefixes.put(number * NUM_WORDS // WAYS, number, 1)
    last = list(dict.fromkeys(reversed(numbers)))[:WAYS]
    for number in range(3 * WAYS + 1):
        assert prefixes.get(number * NUM_WORDS // WAYS) == ({number: 1} if number in last else {})


@pytest.mark.parametrize("use", [lambda row: row.change_key(0, 1), lambda row: row.change_key(1, 1)])
def test_keys_and_loads_do_not_share_cells(use: Callable[[Row], int]):
    counts = SharedCounts.made(2, 3, 2)
    row = Row(counts, 1)
    assert use(row) == 1
    assert row.loads() == [Load(0, 0)] * 3
    assert row.in_flight == 0
