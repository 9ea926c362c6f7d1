"""One plan: from the command's flags to its lines, its JSON or its picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from batcher.buckets import BucketLadder
from model.loading.source import resolve
from scripts.flags.errors import FailedError
from scripts.flags.settings import EngineSettings
from scripts.lab.planning.compiled import compiled_account, obstacle
from scripts.lab.planning.cost import ApiPrice, Cost, cost
from scripts.lab.planning.estimate import Estimator
from scripts.lab.planning.memory import Account, Sizes, size_up
from scripts.lab.planning.plot import plot
from scripts.lab.planning.report import (
    COUNTED,
    ESTIMATED,
    best_lines,
    chips_lines,
    command,
    cost_lines,
    holds,
    marked,
    memory_json,
    memory_lines,
    outcome_json,
    outcome_line,
    step_lines,
)
from scripts.lab.planning.sweep import (
    SEQS,
    TOKENS,
    Candidate,
    Grid,
    Load,
    Outcome,
    Search,
    Simulator,
    capacity,
    search,
)
from scripts.lab.planning.target import Target, parse_target
from scripts.lab.planning.workload import Objectives, Workload, parse_objectives, parse_workload

NAMES = {"1b": "llama-3.2-1b", "3b": "llama-3.2-3b", "8b": "llama-3.1-8b", "70b": "llama-3.1-70b"}
COMPILE = ("full", "layers", "none")  # what the target's compiler counts; not given: all layers, if it is installed
CONTEXT_STEP = 1024  # tokens: the context of a workload is a multiple


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Planner:
    """One run of the command. Raises ValueError, naming the flag, for flags that cannot be used."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.report: Callable[[str], None] = _to_stderr  # of each line of the progress
        self._method = Estimator() if args.no_simulate else Simulator()
        self.target = parse_target(args.target)
        self.workload = parse_workload(args.workload) if args.workload else None
        self.objectives = parse_objectives(args.slo) if args.slo else None
        asked, devices = args.tensor_parallel_size, self.target.num_devices
        if asked is not None and asked > 0 and devices is not None and devices % asked:
            raise ValueError(
                f"--tensor-parallel-size {asked} does not divide the {devices} devices of --target {self.target.name}"
            )
        self._parallel = [asked] if asked is not None else _replica_sizes(self.target)
        self._settings = self._read_settings()
        if self._settings.targets is not None:
            self.objectives = Objectives.of(self._settings.targets)
        self._sizes: dict[int, Sizes] = {}
        self.account: Account | None = None  # of `chosen`, if it is compiled
        self.uncompiled: str | None = None  # why there is no account, without --no-compile
        if args.compile in ("full", "layers") and (fault := obstacle(self.target, 1)) is not None:
            raise ValueError(f"--compile {args.compile}: {fault}")

    def _read_settings(self) -> EngineSettings:
        settings = read_settings(self.args)
        if self.workload is None or settings.max_model_len is not None:
            return settings
        return replace(settings, max_model_len=_context(settings.model, self.workload))

    # --- what is planned ---

    @cached_property
    def found(self) -> Search | None:
        """The simulated settings; None without a workload. Raises FailedError if none meets the objectives."""
        if self.workload is None:
            return None
        seqs, tokens = limits_to_try(self._settings.max_num_seqs, self._settings.max_num_batched_tokens)
        if self._settings.targets is not None:  # limits are ceilings
            seqs, tokens = seqs[:1], tokens[:1]
        refused: list[ValueError] = []

        def candidate(chips: int, rows: int, budget: int) -> Candidate | None:
            try:
                if self._settings.targets is not None:
                    return self._at_ceilings(chips)
                return self.candidate(chips, rows, budget)
            except ValueError as error:  # a model that does not fit on so few chips is not a candidate
                refused.append(error)
                return None

        grid = Grid(parallel=self._parallel, seqs=seqs, tokens=tokens)
        found = search(self._method, candidate, grid, self.workload, self.objectives, self._load, self.report)
        if not found.tried and refused:
            raise refused[-1]
        if found.best is None:
            raise FailedError(self._unmet(found.tried))
        return found

    @property
    def _keeps_targets(self) -> bool:
        """Whether an engine that knows its targets is simulated."""
        return self._method.simulates and self._settings.targets is not None

    def _unmet(self, tried: Sequence[Outcome]) -> str:
        """Why none of the outcomes is good enough."""
        rate = self.args.request_rate
        most = max((outcome.requests_per_s for outcome in tried), default=0.0)
        if rate is not None and most < rate * 0.99:
            return (
                f"--request-rate {rate:g} is too high: {self.target.name} serves at most {most:.2f} requests/s of these"
            )
        fastest = min(tried, key=lambda outcome: outcome.latencies["tpot_ms"][outcome.judged], default=None)
        closest = "" if fastest is None else f"; the closest: {outcome_line(fastest)}"
        limits = f"--slo {self.args.slo}" if self.args.slo else self.objectives and self.objectives.described("p99")
        return f"nothing on {self.target.name} meets {limits}{closest}"

    @cached_property
    def chosen(self) -> Candidate:
        """The best settings; without a workload, the smallest number of chips on which the model fits. With a compiler
        the pages are as many as its account leaves room for, and the best settings are simulated again with them."""
        candidate = self._smallest() if self.found is None else self._best.candidate
        asked, chips = self.args.compile, candidate.sizes.chips
        if asked == "none" or (asked is None and self.args.no_simulate):
            return candidate
        if (fault := obstacle(self.target, chips)) is not None:
            if asked is not None:
                raise ValueError(f"--compile {asked}: {fault}")
            self.uncompiled = fault
            return candidate
        whole = asked != "layers"
        depth = f"all its {candidate.sizes.config.num_layers} layers" if whole else "one and two layers of it"
        self.report(f"compiling the largest step, {depth}; --no-compile leaves it out")
        self.account = compiled_account(candidate.sizes, candidate.settings, candidate.memory, whole=whole)
        compiled = replace(candidate, memory=candidate.sizes.memory(candidate.settings, self.account))
        if self.found is not None and compiled.memory.num_pages != candidate.memory.num_pages:
            self._simulate_again(self.found, compiled)
        return compiled

    def _simulate_again(self, found: Search, compiled: Candidate) -> None:
        """Puts the candidate in the place of the best one. Raises FailedError if it does not meet the objectives."""
        assert self.workload is not None
        buckets = compiled.memory.buckets
        point = Grid(
            parallel=[compiled.sizes.chips], seqs=[buckets.max_num_seqs], tokens=[buckets.max_num_batched_tokens]
        )
        again = search(
            self._method, lambda *_: compiled, point, self.workload, self.objectives, self._load, self.report
        )
        if again.best is None:
            raise FailedError(
                f"the best settings on {self.target.name} do not meet --slo {self.args.slo} with the "
                f"{compiled.memory.num_pages} pages of the compiler's account; --no-compile plans without it"
            )
        found.best = again.best
        found.tried += again.tried

    @property
    def num_candidates(self) -> int:
        """At most so many are tried, and each is reported."""
        return len(self._parallel) + (0 if self._settings.targets else len(SEQS) + len(TOKENS))

    @property
    def _load(self) -> Load:
        return Load(request_rate=self.args.request_rate, max_concurrency=self.args.max_concurrency)

    @property
    def _best(self) -> Outcome:
        assert self.found is not None and self.found.best is not None
        return self.found.best

    def _smallest(self) -> Candidate:
        for chips in self._parallel[:-1]:
            try:
                return self._at_ceilings(chips)
            except ValueError:  # the last one's message is the one that helps
                continue
        return self._at_ceilings(self._parallel[-1])

    def _at_ceilings(self, chips: int) -> Candidate:
        """The limits that are asked for, or those of a server without them."""
        return self.candidate(chips, self._settings.max_num_seqs, self._settings.max_num_batched_tokens)

    def candidate(self, chips: int, rows: int | None, budget: int | None) -> Candidate:
        """Settings of a replica. Raises ValueError if they do not fit its chips."""
        settings = replace(self._settings, tensor_parallel_size=chips, max_num_seqs=rows, max_num_batched_tokens=budget)
        if chips not in self._sizes:
            self._sizes[chips] = size_up(settings, self.target, chips, self.args.device_memory)
        settings = self._sizes[chips].with_models(settings)
        one = Candidate(
            sizes=self._sizes[chips], settings=settings, memory=self._sizes[chips].memory(settings), num_replicas=1
        )
        return replace(one, num_replicas=(self.target.num_devices or one.num_claimed) // one.num_claimed)

    @cached_property
    def cost(self) -> Cost | None:
        """At the best settings; None without a price."""
        if self.args.price_per_hour is None:
            return None
        assert self.workload is not None
        best, is_capacity = self._best, self._load == Load()
        able = best.total_tokens_per_s
        if not is_capacity:
            able = capacity(self._method, best.candidate, self.workload, self.objectives, best)
        return cost(
            self.args.price_per_hour,
            currency=self.args.currency or "USD",
            capacity_tokens_per_s=able,
            output_tokens_per_s=self._best.output_tokens_per_s,
            total_tokens_per_s=self._best.total_tokens_per_s,
            apis=[ApiPrice.parse(text) for text in self.args.api_price],
        )

    # --- how it is shown ---

    @property
    def _holds(self) -> str | None:
        """The rate within targets; None if they are not simulated, or the rate was given."""
        if self.objectives is None or not self._keeps_targets or self._load != Load():
            return None
        return holds(self._best, self.target.name, self.objectives)

    def lines(self) -> Iterator[str]:
        """The report."""
        candidate = self.chosen
        yield from memory_lines(candidate.sizes, candidate.memory, self.account, self.uncompiled)
        yield from chips_lines(candidate)
        if self.args.shapes:
            for b in BucketLadder(candidate.memory.buckets).buckets():
                drafts = f", {b.num_drafts} drafts a row" if b.num_drafts else ""
                yield marked(COUNTED, f"{b.num_tokens:6} tokens {b.num_rows:5} rows  {b.variant}{drafts}")
        if self.found is None or self.workload is None:
            return
        yield from step_lines(candidate, self.workload.typical_context())
        how = "estimated" if self.args.no_simulate else "simulated"
        yield marked(ESTIMATED, f"{self.workload.name}: {len(self.found.tried)} {how} loads")
        for outcome in self.found.tried:
            yield outcome_line(outcome)
        within = f", {self.objectives.described(self._best.judged)}" if self.objectives else ""
        yield marked(ESTIMATED, f"best{within}: {command(candidate, self.account)}")
        if self._holds is not None:
            yield marked(ESTIMATED, self._holds)
        yield from best_lines(self._best)
        if self.cost is not None:
            yield from cost_lines(self.cost)
        self._plot()

    def figures(self) -> dict[str, Any]:
        """The same as JSON values."""
        candidate = self.chosen
        answer: dict[str, Any] = {
            "model": candidate.sizes.name,
            "target": self.target.name,
            "replicas": candidate.num_replicas,
            "idle_devices": candidate.num_idle,
            "memory": memory_json(candidate.sizes, candidate.memory, self.account, self.uncompiled),
        }
        if self.args.shapes:
            answer["shapes"] = [
                [b.num_tokens, b.num_rows, b.variant, b.num_drafts]
                for b in BucketLadder(candidate.memory.buckets).buckets()
            ]
        if self.found is not None:
            answer |= {
                "command": command(candidate, self.account),
                "best": outcome_json(self._best),
                "holds": self._holds,
                "tried": [outcome_json(outcome) for outcome in self.found.tried],
                "workload": self.workload.name if self.workload else None,
                "cost": None if self.cost is None else {**asdict(self.cost), "mark": ESTIMATED},
            }
            self._plot()
        return answer

    def _plot(self) -> None:
        if self.args.plot is not None and self.found is not None:
            title = f"{self.chosen.sizes.name} on {self.target.name}, {self.args.workload}"
            plot(self.found.tried, self._best, self.args.plot, title)


def read_settings(args: argparse.Namespace) -> EngineSettings:
    """The engine flags, of which `--model` may be one of `NAMES`: weights are not read."""
    args = argparse.Namespace(**vars(args))
    if (preset := NAMES.get(args.model.lower())) is not None:
        args.model, args.load_format = f"preset:{preset}", "dummy"
    if args.tensor_parallel_size is None:
        args.tensor_parallel_size = 1
    if getattr(args, "num_models", None) is not None:
        args.models = [f"NAME{number}=PATH{number}" for number in range(1, args.num_models)]
    return EngineSettings.from_namespace(args)


def limits_to_try(rows: int | None, tokens: int | None) -> tuple[Sequence[int], Sequence[int]]:
    """The rows and the tokens of a step that are tried: those asked for, with others that go with them."""
    if rows is not None:
        more = [budget for budget in TOKENS if budget > rows] or [2 * rows]
        return [rows], more if tokens is None else [tokens]
    if tokens is not None:
        return [fewer for fewer in SEQS if fewer < tokens] or [max(tokens // 2, 1)], [tokens]
    return SEQS, TOKENS


def _context(model: str, workload: Workload) -> int:
    """A context that holds the workload's longest request, if the model was trained for it. Raises ValueError if it was
    not trained even for the shortest."""
    trained = resolve(model, weights=False).config.max_position_embeddings
    if workload.shortest() > trained:
        raise ValueError(
            f"--workload {workload.name}: a request has {workload.shortest()} tokens, and the model was trained for "
            f"{trained}"
        )
    return min(-(-(workload.longest() + 1) // CONTEXT_STEP) * CONTEXT_STEP, trained)


def _replica_sizes(target: Target) -> list[int]:
    """Numbers of devices of a replica to try: powers of two, of whole chips. Those that leave no device of the target
    idle come first."""
    devices = target.num_devices or 1
    sizes = [1 << i for i in range(devices.bit_length())]
    whole = [size for size in sizes if size >= target.devices_per_process] if target.num_devices else sizes
    return sorted(whole, key=lambda size: (devices % size > 0, size))
