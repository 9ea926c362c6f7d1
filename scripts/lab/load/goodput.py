"""The highest request rate that a server serves within service-level objectives, found by trials at rising rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.lab.load.metrics import both_of
from scripts.lab.tables import Table

PRECISION = 1.1  # the rate found and the next one that failed differ by at most this factor
MOST_TRIALS = 12


@dataclass(frozen=True)
class Trial:
    """The outcome of one rate: the `summary` of its requests, and whether enough of them met the objectives."""

    rate: float  # requests per second
    result: dict[str, Any]
    passed: bool


def passes(result: dict[str, Any], *, share: float) -> bool:
    """Whether at least `share` of all requests, also of those that failed, met the objectives of the summary."""
    sent = result["completed"] + result["failed"]
    good: int = result["goodput"]["requests"]
    return bool(sent) and good >= share * sent


def find_rate(attempt: Callable[[float], Trial], *, start: float, precision: float = PRECISION) -> list[Trial]:
    """The trials of a search, in their order. The highest rate among those that passed is the one found.

    The rate doubles until a trial fails, or halves until one passes. Then the search goes on between the two, on a
    logarithmic scale, until they differ by the factor `precision`. A server that passes nowhere, or everywhere, ends it
    after `MOST_TRIALS`.
    """
    trials: list[Trial] = []
    passed, failed = 0.0, math.inf
    rate = start
    while len(trials) < MOST_TRIALS and failed > precision * passed:
        trial = attempt(rate)
        trials.append(trial)
        if trial.passed:
            passed = rate
        else:
            failed = rate
        if math.isinf(failed):
            rate = 2 * passed
        elif not passed:
            rate = failed / 2
        else:
            rate = math.sqrt(passed * failed)
    return trials


def best_of(trials: list[Trial]) -> Trial | None:
    """The trial with the highest rate that passed; None if none did."""
    return max((trial for trial in trials if trial.passed), key=lambda trial: trial.rate, default=None)


def table(trials: list[Trial], slos_ms: dict[str, float], *, needed: float) -> str:
    """The trials by their rates, and the rate found."""
    slos = ", ".join(f"{name} <= {limit:g} ms" for name, limit in slos_ms.items())
    latencies = {"TTFT p50/p99 ms": ">13", "TPOT p50/p99 ms": ">13"}
    rates = {"requests/s": "8.2f", "requests": "7", "within SLOs": "7.0%", "goodput/s": "8.2f"}
    table = Table({**rates, **latencies, "": ""})
    for trial in sorted(trials, key=lambda trial: trial.rate):
        result = trial.result
        sent, good = result["completed"] + result["failed"], result["goodput"]
        shown = [both_of(result, name) for name in ("ttft", "tpot")]
        share, rate = good["requests"] / sent, good["requests_per_s"]
        table.row(trial.rate, sent, share, rate, *shown, "" if trial.passed else "failed")
    best = best_of(trials)
    found = "no rate" if best is None else f"{best.rate:.2f} requests/s"
    goodput = f"goodput: {found} with at least {needed:.0%} of the requests within {slos}"
    return "\n".join([*table.lines, "", goodput])
