"""What the programs of a start cost to compile, by the target's own compiler and without the chip."""

from __future__ import annotations

import heapq
import json
import math
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from batcher.buckets import BucketLadder
from batcher.step import Bucket, longest_first
from scripts.lab.accounts.process import printing
from scripts.lab.planning.compiled import Described

if TYPE_CHECKING:
    from model.compiling.program import Program

TRACER_START_S, READ_S = 2.0, 0.1  # of a process that traces, and of a program that it has kept
PATCH = "patch"  # the smallest program, as `StepPrograms` names it


@dataclass(frozen=True, kw_only=True)
class Cost:
    """CPU seconds of one program."""

    trace: float  # to JAX's own form
    lower: float  # to StableHLO
    compile: float  # to code of the chip

    @property
    def python(self) -> float:
        """What holds the interpreter's lock: programs do this one after the other."""
        return self.trace + self.lower

    @property
    def total(self) -> float:
        """The sum of all three."""
        return self.python + self.compile

    def plus(self, other: Cost, times: float = 1.0) -> Cost:
        """This one and so many times the other."""
        return Cost(
            trace=self.trace + times * other.trace,
            lower=self.lower + times * other.lower,
            compile=self.compile + times * other.compile,
        )


NOTHING = Cost(trace=0.0, lower=0.0, compile=0.0)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A program of the ladder."""

    name: str
    cost: Cost | None  # None: it was not compiled, and neither was one of its kind
    taken_from: str | None = None  # the program of its kind whose cost this is; None: its own


@dataclass(frozen=True, kw_only=True)
class Question(Described):
    """What the compiler's process is asked for: programs of a start, at several depths."""

    names: Sequence[str]  # of the programs
    depths: Sequence[int]  # numbers of layers, one or two


def name_of(key: Bucket | str) -> str:
    """`greedy:64` is a decode of 64 rows, and `sample:512x8` a step of 512 tokens and 8 rows."""
    if isinstance(key, str):
        return key
    drafts = f"+{key.num_drafts} drafts" if key.num_drafts else ""
    shape = key.num_tokens if key.decode_only else f"{key.num_tokens}x{key.num_rows}"
    return f"{key.variant}:{shape}{drafts}{'+adapters' if key.has_adapters else ''}"


def costs(question: Question, depth: int, report: Callable[[str], None]) -> dict[str, Cost]:
    """What each program takes in a model of `depth` layers: as compiled at one depth, or linear in those of two.

    Args:
        report: gets a line when a program is compiled.

    Raises:
        CompilerError: the compiler refuses, or there is no such program.
    """
    of_depths: dict[str, list[Cost]] = {}
    for line in printing(__name__, stdin=pickle.dumps(question)):
        name, num_layers, cost = line["name"], line["num_layers"], Cost(**line["cost"])
        of_depths.setdefault(name, []).append(cost)
        report(f"{name} with {num_layers} layers: {cost.total:.1f} CPU s")
    return {name: _at_depth(found, question.depths, depth) for name, found in of_depths.items()}


def _at_depth(found: Sequence[Cost], depths: Sequence[int], depth: int) -> Cost:
    if len(depths) == 1:
        return found[0]
    layer = found[1].plus(found[0], -1)
    more = Cost(trace=max(0.0, layer.trace), lower=max(0.0, layer.lower), compile=max(0.0, layer.compile))
    return found[1].plus(more, (depth - depths[1]) / (depths[1] - depths[0]))


def entries(buckets: Sequence[Bucket], updates: Iterable[str], found: Mapping[str, Cost]) -> list[Entry]:
    """The entries of all programs, in the order in which a start traces them. One that was not compiled takes the cost
    of the one of its kind (variant, decode or not) with the nearest number of tokens, then of rows."""
    compiled = [bucket for bucket in buckets if name_of(bucket) in found]
    whole = []
    for bucket in longest_first(buckets):
        alike = [other for other in compiled if _kind(other) == _kind(bucket)]
        nearest = min(alike, key=lambda other: _distance(other, bucket), default=None)
        if nearest is None:
            whole.append(Entry(name=name_of(bucket), cost=None))
        else:
            name, other = name_of(bucket), name_of(nearest)
            whole.append(Entry(name=name, cost=found[other], taken_from=None if other == name else other))
    return whole + [Entry(name=name, cost=found.get(name)) for name in updates]


def _kind(bucket: Bucket) -> tuple[object, ...]:
    return bucket.variant, bucket.decode_only, bucket.num_drafts > 0, bucket.has_adapters


def _distance(one: Bucket, other: Bucket) -> tuple[float, float]:
    return (
        abs(math.log2(one.num_tokens / other.num_tokens)),
        abs(math.log2(one.num_rows / other.num_rows)),
    )


def ready_after(programs: Iterable[Cost], num_cores: int, num_tracers: int = 0) -> float:
    """Seconds until all are compiled on idle cores: each by the first core that is free, when the engine has traced it
    or read it. Compilers that use several cores for one program take less."""
    costs = list(programs)
    traced, tracers_end = traced_after(costs, num_tracers)
    ends = traced[-1:] or [0.0]
    free = [0.0] * (num_cores - 1 - num_tracers) + tracers_end + ends  # the last one is the core of the engine
    heapq.heapify(free)
    for cost, since in zip(costs, traced, strict=True):
        finished = max(heapq.heappop(free), since) + cost.compile
        heapq.heappush(free, finished)
        ends.append(finished)
    return max(ends)


def traced_after(costs: Sequence[Cost], num_tracers: int) -> tuple[list[float], list[float]]:
    """Seconds until the engine has each program, in their order, and until each tracer has done its share.

    The tracers take the programs from the end, and none that the engine has traced meanwhile is left out: an upper
    bound.
    """
    kept, ends = [math.inf] * len(costs), [TRACER_START_S] * num_tracers
    for place, index in enumerate(reversed(range(len(costs)) if num_tracers else ())):
        ends[place % num_tracers] += costs[index].python
        kept[index] = ends[place % num_tracers]
    traced, now = [], 0.0
    for cost, is_kept_at in zip(costs, kept, strict=True):
        now += READ_S if is_kept_at <= now else cost.python
        traced.append(now)
    return traced, ends


def _answer(asked: Question) -> None:
    """Prints the cost of each program at each depth: in a process that has the compiler's environment before it imports
    jax."""
    from model.compiling.compiler_options import compiler_options

    options = compiler_options(asked.target.platform)
    for number, num_layers in enumerate(asked.depths):
        described, compiling = asked.programs(num_layers)
        programs: dict[str, Program] = {name_of(b): described.step(b) for b in BucketLadder(asked.buckets).buckets()}
        programs |= described.updates()
        with compiling:
            if number == 0:  # what JAX and the compiler do once is none of a program's
                _cost(programs[PATCH], options)
                programs[asked.names[0]].lower()
            for name in asked.names:
                cost = asdict(_cost(programs[name], options))
                print(json.dumps({"name": name, "num_layers": num_layers, "cost": cost}), flush=True)


def _cost(program: Program, options: dict[str, Any]) -> Cost:
    marks = [time.process_time()]
    traced = program.trace()
    marks.append(time.process_time())
    lowered = traced.lower()
    marks.append(time.process_time())
    lowered.compile(compiler_options=options)
    marks.append(time.process_time())
    trace, lower, compiling = (end - begin for begin, end in pairwise(marks))
    return Cost(trace=trace, lower=lower, compile=compiling)


if __name__ == "__main__":
    _answer(pickle.load(sys.stdin.buffer))  # from the process that has started this one
