"""Several models on the chips of a plan, in simulated time: the highest rate of requests within targets, per chip."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from scripts.flags.parsing import parse_flags
from scripts.flags.settings import add_engine_flags
from scripts.lab.load.goodput import Trial, best_of, find_rate
from scripts.lab.planning.memory import size_up
from scripts.lab.planning.planner import read_settings
from scripts.lab.planning.sweep import Candidate
from scripts.lab.planning.target import Target
from scripts.lab.simulation.machine import SimulatedRequest
from scripts.lab.simulation.models import Fleet, among, apart, asleep, together
from scripts.lab.tables import Table

WAYS = TOGETHER, ASLEEP, APART = "together", "asleep", "apart"
SPLITS = {"evenly": 0.0, "Zipf": 1.1}  # how requests name the models -> the exponent of their shares
TURNS_S = (0.0, 8.0)  # of processes that sleep: the better one counts
START_RATE = 0.5  # requests per second and chip of the first trial
COLUMNS = {
    "target": "<8", "split": "<6", "way": "<37", "chips": "2", "requests/s": "7.3f", "within targets": "4.0%",
    "of them per second and chip": "7.3f", "TTFT p50 / p90 / p99 s": ">18", "TPOT p50 / p90 / p99 ms": ">18",
    "changes": "5",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Limits of latency, and the share of the requests that must keep both."""

    ttft_s: float
    tpot_s: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to serve the models. `runs` are variants, of which the first that is good enough counts, or the best."""

    kind: str  # of WAYS
    name: str
    num_chips: int
    runs: Sequence[Callable[[Sequence[SimulatedRequest]], Fleet]]

    def attempt(self, arriving: Callable[[float], Sequence[SimulatedRequest]], targets: Targets, rate: float) -> Trial:
        """What comes of a rate, in requests per second of all models."""
        requests, tried = arriving(rate), list[Trial]()
        for run in self.runs:
            fleet = run(requests)
            share = fleet.share_within(targets.ttft_s, targets.tpot_s)
            tried.append(Trial(rate, {"fleet": fleet, "share": share}, passed=share >= targets.share))
            if tried[-1].passed:
                break
        return max(tried, key=lambda trial: float(trial.result["share"]))


def planned(
    target: Target, flags: Sequence[str], num_models: int, num_chips: int, num_resident: int | None
) -> Candidate:
    """The settings of one engine for an 8B.

    Args:
        flags: of the engine.
        num_resident: models on its chips at once; 0: as many as an engine chooses; None: it has one model only.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_flags(parser)
    args = parse_flags(parser, ["--model", "8b", "--tensor-parallel-size", str(num_chips), *flags])
    if num_resident is not None:
        args.num_models, args.max_resident_models = num_models, num_resident or None
    settings = read_settings(args)
    sizes = size_up(settings, target, num_chips)
    settings = sizes.with_models(settings)
    return Candidate(sizes=sizes, settings=settings, memory=sizes.memory(settings), num_replicas=1)


def ways(
    plan: Callable[[int, int | None], Candidate], num_models: int, num_chips: int, num_resident: Sequence[int]
) -> Iterator[Way]:
    """Makes the ways on `num_chips` chips: one engine, processes that sleep, and a chip for each model.

    Args:
        plan: settings of one replica, by its chips and the number of models on them at once (None: one model only).
        num_resident: of the engine; 0: as many as an engine chooses.
    """
    tried = set[int]()
    for count in num_resident:
        candidate = plan(num_chips, count)
        here = candidate.memory.max_models
        if here not in tried:
            tried.add(here)
            name = f"one engine, {min(here, num_models)} of {num_models} on the device"
            yield Way(
                kind=TOGETHER, name=name, num_chips=num_chips, runs=[partial(together, machine=candidate.machine)]
            )
    alone = plan(num_chips, None)
    sleeping = partial(asleep, machine=alone.machine, num_models=num_models, wake_s=alone.sizes.bring_s)
    runs = [partial(sleeping, turn_s=turn_s) for turn_s in TURNS_S]
    yield Way(kind=ASLEEP, name=f"{num_models} processes that sleep", num_chips=num_chips, runs=runs)
    own = partial(apart, machine=plan(1, None).machine, num_models=num_models)
    yield Way(kind=APART, name=f"{num_models} chips", num_chips=num_models, runs=[own])


def compare_ways(
    table: Table,
    title: str,
    found: Sequence[Way],
    arriving: Callable[[float], Sequence[SimulatedRequest]],
    num_models: int,
    targets: Targets,
    splits: Sequence[str],
) -> None:
    """Adds a row for each of these SPLITS and each way.

    Args:
        table: it has `COLUMNS`.
        arriving: gives the requests at a rate per second.
    """
    for split in splits:

        def named(rate: float, zipf: float = SPLITS[split]) -> list[SimulatedRequest]:
            return among(arriving(rate), num_models, zipf=zipf)

        for way in found:
            best = best_of(find_rate(partial(way.attempt, named, targets), start=START_RATE * way.num_chips))
            if best is None:
                table.row(title, split, way.name, way.num_chips, *[None] * (len(COLUMNS) - 4))
                continue
            fleet: Fleet = best.result["fleet"]
            ttft, tpot = fleet.percentiles(50, 90, 99)
            table.row(
                title,
                split,
                way.name,
                way.num_chips,
                best.rate,
                best.result["share"],
                best.rate * best.result["share"] / way.num_chips,
                " / ".join(f"{value:.2f}" for value in ttft),
                " / ".join(f"{value * 1e3:.0f}" for value in tpot),
                fleet.num_changes,
            )
