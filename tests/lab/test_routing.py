"""Ways to choose among replicas: in simulated time, where figures are the same on every machine, and the bench."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from scripts.lab import routing
from scripts.lab.simulation.machine import Machine, PerToken
from scripts.lab.simulation.replicas import Replicas, simulate_replicas
from scripts.lab.simulation.routers import LastSent, LeastLoaded, RoundRobin
from scripts.lab.simulation.shared_prefixes import shared_prefixes
from server.engine.routing import MOST_AHEAD, Router
from tests.conftest import EXPORTED
from tests.demo.one_layer import one_layer

POLICIES = {"in turns": RoundRobin, "least loaded": LeastLoaded, "last sent": LastSent, "own": Router}
PREFIX = 1024  # tokens
NUM_PREFIXES = 40


@dataclass(frozen=True)
class Figures:
    hit_rate: float
    p50: float  # seconds to the first token
    p99: float
    mean: float


def machine(share: float) -> Machine:
    """It has pages for this share of the prefixes, and a prompt costs as much as on a small chip."""
    num_pages = int(share * NUM_PREFIXES * PREFIX) // 64
    return Machine(num_pages=num_pages, page_size=64, cost=PerToken(0.008, 0.0001))


def run(share: float, rate: float, *, prefix_len: int = PREFIX, tail_len: int = 64, num_engines: int = 2):
    """The figures of each policy over three seeds, and of the own one what came of each run."""
    ttft: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    hits: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    own: list[Replicas] = []
    for seed in range(3):
        requests = shared_prefixes(
            300, num_prefixes=NUM_PREFIXES, prefix_len=prefix_len, tail_len=tail_len, output_len=60, rate=rate,
            seed=seed,
        )  # fmt: skip
        for policy, router in POLICIES.items():
            replicas = simulate_replicas(
                requests, machine(share), num_engines, lambda clock, router=router: router(clock=clock)
            )
            assert len(replicas.ttft) == len(requests)
            ttft[policy] += replicas.ttft
            hits[policy].append(replicas.hit_rate)
            own += [replicas] if policy == "own" else []
    found = {
        policy: Figures(np.mean(hits[policy]), *np.percentile(seconds, [50, 99]), np.mean(seconds))
        for policy, seconds in ttft.items()
    }
    return found, own


@pytest.fixture(scope="module")
def fits_two():
    """One pool has room for six tenths of the prefixes, and both together for all."""
    return run(0.6, 14.0)


def test_each_replica_keeps_its_own_prefixes_where_one_cannot_have_all(fits_two):
    figures, _ = fits_two
    own = figures["own"]
    for policy in ("in turns", "least loaded"):
        assert own.hit_rate > 1.5 * figures[policy].hit_rate
        assert own.p50 < 0.4 * figures[policy].p50
        assert own.p99 < 0.8 * figures[policy].p99


def test_weighing_the_queues_is_better_than_the_last_engine_that_was_sent_a_prefix(fits_two):
    figures, _ = fits_two
    own, before = figures["own"], figures["last sent"]
    assert own.hit_rate >= before.hit_rate - 0.01
    assert own.p99 < 0.95 * before.p99
    assert own.mean < before.mean


def test_no_replica_runs_far_ahead_of_another(fits_two):
    _, own = fits_two
    for replicas in own:
        assert replicas.most_ahead <= 2 * MOST_AHEAD
        assert max(replicas.num_sent) < 1.25 * min(replicas.num_sent)


def test_where_both_pools_are_too_small_it_is_better_still():
    figures, _ = run(0.3, 12.0)
    own, before = figures["own"], figures["last sent"]
    for policy in ("in turns", "least loaded"):
        assert own.hit_rate > 1.5 * figures[policy].hit_rate
        assert own.p99 < 0.8 * figures[policy].p99
    assert own.hit_rate >= before.hit_rate - 0.01
    assert own.p99 < 0.85 * before.p99


def test_nothing_is_lost_where_nothing_is_shared():
    figures, _ = run(0.6, 9.0, prefix_len=0, tail_len=1000)
    own = figures["own"]
    assert own.hit_rate == 0
    turns = figures["in turns"]  # prompts of about the same length are best sent in turns
    assert own.p50 <= 1.04 * turns.p50 and own.mean <= 1.04 * turns.mean and own.p99 <= 1.04 * turns.p99
    for policy in ("least loaded", "last sent"):
        assert own.p50 < figures[policy].p50
        assert own.p99 < 0.9 * figures[policy].p99


def test_a_prefix_that_all_share_is_computed_by_each_replica_once():
    requests = shared_prefixes(300, num_prefixes=1, prefix_len=PREFIX, tail_len=64, output_len=60, rate=60.0)
    own = simulate_replicas(requests, machine(0.6), 3, lambda clock: Router(clock=clock))
    turns = simulate_replicas(requests, machine(0.6), 3, lambda clock: RoundRobin(clock=clock))
    assert max(own.num_sent) < 1.3 * min(own.num_sent)
    assert own.hit_rate >= turns.hit_rate
    assert np.median(own.ttft) <= 1.1 * np.median(turns.ttft)
    assert max(own.ttft) <= 1.3 * max(turns.ttft)  # the first of them wait for the prefix, in one queue


@pytest.mark.slow
def test_every_policy_serves_the_same_requests(tmp_path, capsys, free_port):
    out = tmp_path / "out.json"
    flags = ["--model", str(one_layer(tmp_path / "model")), "--prefixes", "4", "--prefix-len", "64", "--rounds", "2"]
    flags += ["--num-requests", "12", "--request-rate", "50", "--port", str(free_port), "--output-json", str(out)]
    assert routing.main([*flags, "--", "--max-num-batched-tokens", "16", "--export-cache", str(EXPORTED)]) == 0
    results = json.loads(out.read_text())
    assert list(results) == ["round robin", "least loaded", "prefix"]
    for rounds in results.values():
        assert [row["completed"] for row in rounds] == [12, 12]
        assert all(0 <= row["hit_rate"] < 1 for row in rounds)
    assert all(row["hit_rate"] > 0 for row in results["prefix"])
    assert "prefix / least loaded (TTFT p99): " in capsys.readouterr().out


def test_lengths_that_are_none_are_refused(capsys):
    assert routing.main(["--prefix-len", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
