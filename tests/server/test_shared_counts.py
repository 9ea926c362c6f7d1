"""The counts that all HTTP processes see."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.shared_counts import ENGINE_BITS, NUM_WORDS, PrefixTable, Row, SharedCounts

DIGESTS = st.integers(-(2**63), 2**63 - 1)


def write(counts: SharedCounts) -> None:
    row = Row(counts, 1)
    row.set_in_flight(5)
    row.set_load(1, 7)
    row.change_key(0, 2)
    PrefixTable(counts).put(-3, 1)


def test_another_process_writes_what_this_one_reads():
    counts = SharedCounts.made(2, 2, 1)
    process = multiprocessing.get_context("spawn").Process(target=write, args=(counts,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    row = Row(counts, 0)
    row.set_in_flight(1)
    row.set_load(0, 2)
    assert (row.in_flight, row.loads(), row.change_key(0, 1)) == (6, [2, 7], 3)
    assert PrefixTable(counts).get(-3) == 1
    counts.clear(1)
    assert (row.in_flight, row.loads(), row.change_key(0, 0)) == (1, [2, 0], 1)


def test_the_process_with_the_fewest_connections_is_first():
    counts = SharedCounts.made(3, 1, 0)
    rows = [Row(counts, number) for number in range(3)]
    rows[0].set_connections(2)
    rows[1].set_connections(1)
    assert [row.is_first for row in rows[:2]] == [False, True]  # the third accepts none yet
    rows[2].set_connections(1)
    assert [row.is_first for row in rows] == [False, True, True]
    assert rows[0].connections == 4
    counts.clear(1)
    assert rows[0].connections == 3


@given(st.dictionaries(DIGESTS, st.integers(0, 2**ENGINE_BITS - 2), max_size=20), DIGESTS)
def test_a_digest_is_found_with_its_engine_or_not_at_all(engines: dict[int, int], other: int):
    prefixes = PrefixTable(SharedCounts.made(1, 2, 0))
    places: dict[int, int] = {}  # the last digest in each place
    for digest, engine in engines.items():
        prefixes.put(digest, engine)
        places[digest % NUM_WORDS] = digest
    for digest in [*engines, other]:
        expected = engines[digest] if places.get(digest % NUM_WORDS) == digest else None
        assert prefixes.get(digest) == expected
    prefixes.clear()
    assert all(prefixes.get(digest) is None for digest in engines)


@pytest.mark.parametrize("use", [lambda row: row.change_key(0, 1), lambda row: row.change_key(1, 1)])
def test_keys_and_loads_do_not_share_cells(use: Callable[[Row], int]):
    counts = SharedCounts.made(2, 3, 2)
    row = Row(counts, 1)
    assert use(row) == 1
    assert row.loads() == [0, 0, 0]
    assert row.in_flight == 0
