"""The bench "kv_connectors", and the bounds of jax.experimental.transfer for which K/V pages go over ZeroMQ."""

from __future__ import annotations

import pytest

from scripts.lab import kv_connectors


def test_the_bench_moves_the_pages_both_ways_and_compares_them(capsys) -> None:
    assert kv_connectors.main(["--page-kib", "64", "--pages", "70", "--rounds", "1", "--no-faults"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| zmq", "| jax"))]
    assert len(rows) == 2


@pytest.mark.slow
def test_a_stranger_can_end_a_giver() -> None:
    """If this fails, a later jax may do for K/V pages: see scripts/lab/results/2026-11-25-kv-transfer.md."""
    assert kv_connectors.four_zeros() == "it has ended: SIGABRT"
