"""Ways to choose among replicas: in simulated time, where figures are the same on every machine, and the bench."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from scripts.lab import routing
from scripts.lab.simulation.routers import ROUTERS
from scripts.lab.simulation.shared_prefixes import CASES, Figures, compare_routers
from server.engine.routing import MOST_AHEAD
from tests.conftest import COMPILED
from tests.demo.one_layer import one_layer

TWO_POOLS, _, NOTHING_SHARED = CASES.values()
pytestmark = pytest.mark.slow
BLIND = ("round robin", "least loaded")


@pytest.fixture(scope="module")
def two_pools() -> dict[str, Figures]:
    return compare_routers(TWO_POOLS)


def test_each_replica_keeps_its_own_prefixes_where_one_cannot_have_all(two_pools):
    own = two_pools["prefix"]
    for policy in BLIND:
        other = two_pools[policy]
        assert own.hit_rate > 1.5 * other.hit_rate
        assert own.percentile(50) < 0.4 * other.percentile(50)
        assert own.percentile(99) < 0.8 * other.percentile(99)


def test_weighing_the_queues_is_better_than_the_last_engine_that_was_sent_a_prefix(two_pools):
    own, before = two_pools["prefix"], two_pools["last sent"]
    assert own.hit_rate >= before.hit_rate - 0.01
    assert own.percentile(99) < 0.95 * before.percentile(99)
    assert own.ttft.mean() < before.ttft.mean()


def test_no_replica_runs_far_ahead_of_another(two_pools):
    for run in two_pools["prefix"].runs:
        assert run.most_ahead <= 2 * MOST_AHEAD
        assert max(run.num_sent) < 1.25 * min(run.num_sent)


def test_nothing_is_lost_where_nothing_is_shared():
    figures = compare_routers(NOTHING_SHARED)
    own, turns = figures["prefix"], figures["round robin"]
    assert own.hit_rate == 0
    assert own.ttft.mean() <= 1.04 * turns.ttft.mean()  # prompts of about one length are best sent in turns
    for q in (50, 99):
        assert own.percentile(q) <= 1.04 * turns.percentile(q)
    for policy in ("least loaded", "last sent"):
        assert own.percentile(50) < figures[policy].percentile(50)
        assert own.percentile(99) < 0.9 * figures[policy].percentile(99)


def test_the_simulated_table_has_a_row_for_each_policy_and_workload(capsys, monkeypatch):
    monkeypatch.setattr(routing, "CASES", {name: replace(case, rate=100.0) for name, case in CASES.items()})
    assert routing.main(["--simulate", "--num-requests", "6"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 4 * len(CASES)


def test_every_policy_serves_the_same_requests(tmp_path, capsys, free_port, monkeypatch):
    """Of two, each with a server of two replicas. The others are in the tests above."""
    monkeypatch.setattr(routing, "ROUTERS", {name: ROUTERS[name] for name in ("least loaded", "prefix")})
    out = tmp_path / "out.json"
    flags = ["--model", str(one_layer(tmp_path / "model")), "--prefixes", "4", "--prefix-len", "64", "--rounds", "2"]
    flags += ["--num-requests", "12", "--request-rate", "50", "--port", str(free_port), "--output-json", str(out)]
    assert routing.main([*flags, "--", "--max-num-batched-tokens", "16", "--compile-cache", str(COMPILED)]) == 0
    results = json.loads(out.read_text())
    assert list(results) == ["least loaded", "prefix"]
    for rounds in results.values():
        assert [row["completed"] for row in rounds] == [12, 12]
        assert all(0 <= row["hit_rate"] < 1 for row in rounds)
    assert all(row["hit_rate"] > 0 for row in results["prefix"])
    assert "prefix / least loaded (TTFT p99): " in capsys.readouterr().out
