"""The highest rate of a load at which a policy keeps the targets, on a chip that only takes time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

from batcher.request import Targets
from scripts.lab.load.goodput import Trial, best_of, find_rate
from scripts.lab.simulation.loads import Draw
from scripts.lab.simulation.machine import Machine, Result, simulate
from scripts.lab.simulation.policies import AdmitIfFree, Feedback, PrefillPressure

TOKENS = (1536, 1024, 768, 512, 2048, 4096, 256)  # of a step, of the static pairs; likely ones first
ROWS = (256, 512, 128, 64)
PRECISION = 1.05  # the rate found and the next one that failed differ by at most this factor
START_RATE = 16.0  # requests per second of the first trial
TARGETS, DEFAULT, BEST = "targets", "default", "best static pair"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits of rows and tokens, and how the tokens of a step are chosen below them."""

    rows: int = 256
    tokens: int = 2048
    options: Mapping[str, Any] = field(default_factory=dict)  # of `SimulatedEngine`
    adapt: Callable[[], Any] | None = None  # makes its `adapt`


def policies(targets: Targets) -> dict[str, Policy]:
    """Those that know nothing of the load."""
    itl_s = float("inf") if targets.itl_ms is None else targets.itl_ms / 1e3
    free = {"max_stalls": 0}
    return {
        DEFAULT: Policy(),
        "vLLM, 2,048 tokens": Policy(options=free | {"forecast": AdmitIfFree()}),
        "vLLM, 8,192 tokens": Policy(tokens=8192, options=free | {"forecast": AdmitIfFree()}),
        "P-PAS, 1,280 or 8,192": Policy(tokens=8192, adapt=lambda: PrefillPressure(1280, 8192)),
        "feedback on ITL": Policy(tokens=8192, adapt=lambda: Feedback(itl_s, 128, 8192)),
        TARGETS: Policy(options={"follows_targets": True}),
    }


def highest_rate(keeps: Callable[[float], bool], *, start: float = START_RATE, above: float = 0.0) -> float:
    """The highest rate that `keeps` the targets; 0 if none does, or none above `above`."""

    @cache
    def attempt(rate: float) -> Trial:
        return Trial(rate, {}, keeps(rate))

    if above and not attempt(above * PRECISION).passed:
        return 0.0
    best = best_of(find_rate(attempt, start=above * PRECISION or start, precision=PRECISION))
    return 0.0 if best is None else best.rate


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A load on a chip, with its targets.

    Args:
        machine: of the rows and tokens of a step, which leave the more pages the fewer they are.
    """

    draw: Draw
    count: int
    machine: Callable[[int, int], Machine]
    targets: Targets

    def at(self, policy: Policy, rate: float, **options: Any) -> Result:
        """What comes of a rate."""
        return simulate(
            self.draw(self.count, rate),
            self.machine(policy.rows, policy.tokens),
            targets=self.targets,
            adapt=policy.adapt and policy.adapt(),
            **policy.options,
            **options,
        )

    def rate_of(self, policy: Policy, above: float = 0.0) -> float:
        """The highest rate at which the policy keeps the targets; 0 if there is none, or none above `above`."""
        return highest_rate(lambda rate: self.at(policy, rate, ends_early=True).keeps_targets, above=above)

    def best_static(self, seqs: Sequence[int] = ROWS, tokens: Sequence[int] = TOKENS) -> tuple[Policy, float]:
        """The pair of limits with the highest rate, and this rate; the first pair if none keeps the targets."""
        pairs = [Policy(rows=rows, tokens=budget) for budget, rows in product(tokens, seqs) if rows < budget]
        best, most = pairs[0], 0.0
        for pair in pairs:
            if rate := self.rate_of(pair, above=most):
                best, most = pair, rate
        return best, most


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a policy does with a load."""

    name: str
    policy: Policy
    rate: float  # the highest, in requests per second, at which it keeps the targets; 0: none
    same: Result  # at the rate of the best static pair, which all policies get


def compare_on(
    bench: Bench, seqs: Sequence[int], tokens: Sequence[int], names: Collection[str] | None = None
) -> Iterator[Held]:
    """The best static pair, and the policies that know nothing of the load.

    Args:
        names: of the policies to compare with the best static pair; None: all.
    """
    best, rate = bench.best_static(seqs, tokens)
    for name, policy in ({BEST: best} | policies(bench.targets)).items():
        if policy is best or names is None or name in names:
            yield Held(
                name=name,
                policy=policy,
                rate=rate if policy is best else bench.rate_of(policy),
                same=bench.at(policy, rate or START_RATE),
            )
