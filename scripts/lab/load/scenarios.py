"""Mixed loads by name: which servers are started, and what each row of the table sends to one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from batcher.request import Targets
from scripts.lab.load.arrivals import arrival_times
from scripts.lab.load.lengths import Lengths
from scripts.lab.load.workload import BenchRequest, random_prompts, random_text

FULL_CONTEXT = 8192  # tokens; the lengths below are for a server with this context, and shrink with it
STREAMS = 32
MOST_CHATS = 4000  # of one row: more than a row has time for
VOCAB_SIZE = 1000  # of the prompts, which are token ids: every model has as many
TEXT_CHARS = 12  # of a long text, for each token of the context: more than a server takes, so it is cut
TEXTS_PER_S = 5
URGENT, PATIENT = 0, 10  # priorities: the lower one runs first

TARGETS = Targets(ttft_ms=2000.0, itl_ms=100.0)
TARGET_ROUNDS = 3

_UNCACHED = "--no-enable-prefix-caching"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a scenario is."""

    context: int = 1024  # tokens of prompt and output that the servers serve
    seconds: float = 15.0  # in which a row sends requests

    def scaled(self, tokens: int) -> int:
        """A length for a context of 8,192 tokens in this one."""
        return max(1, tokens * self.context // FULL_CONTEXT)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Requests that are reported together. Without arrivals `concurrency` of them are kept in flight."""

    name: str
    requests: Sequence[BenchRequest]
    arrivals: Sequence[float] | np.ndarray | None = None  # seconds
    concurrency: int | None = None


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A row of the table, or one for each of its parts, which are sent at the same time."""

    name: str
    server: str  # one of the scenario's
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Servers by their names, with their flags, and the rows. The rows are made anew in each round, from the capacity
    of the first server for chats in requests per second (0 if the scenario does not need it)."""

    servers: Callable[[Size], dict[str, str]]
    variants: Callable[[Size, float, np.random.Generator], list[Variant]]
    needs_capacity: bool = False
    rounds: int = 1
    ratios: tuple[tuple[str, str, str, str], ...] = ()  # text, metric, and the rows whose figures are divided
    targets: Targets | None = None  # the table says how many requests are within them, in each round


def prompts(lengths: np.ndarray, random: np.random.Generator, *, shared: int = 0) -> Sequence[str | list[int]]:
    """Token ids: `shared` that all prompts begin with, and as many more as `lengths` says."""
    return random_prompts(lengths, as_ids=True, vocab_size=VOCAB_SIZE, shared_prefix=shared, random=random)


def chats(size: Size, count: int, random: np.random.Generator) -> list[BenchRequest]:
    """Prompts with the spread of Azure's conversation trace, and outputs of 64 tokens in the median."""
    median, longest = size.scaled(1020), size.context // 2
    inputs = Lengths("lognormal", (median, 0.8, 4, longest)).draw(count, random)
    outputs = Lengths("lognormal", (size.context / 16, 0.7, 8, size.context // 4)).draw(count, random)
    return [BenchRequest(p, int(n)) for p, n in zip(prompts(inputs, random), outputs, strict=True)]


def closed_loop(size: Size, random: np.random.Generator) -> Part:
    """Each stream has one chat at a time."""
    return Part(name="chats", requests=chats(size, MOST_CHATS, random), concurrency=STREAMS)


def _long_prompts(size: Size, capacity: float, random: np.random.Generator) -> list[Variant]:
    def long_part() -> Part:
        count = max(1, int(size.seconds))
        lengths = np.full(count, size.scaled(7168))
        requests = [BenchRequest(prompt, 16) for prompt in prompts(lengths, random)]
        return Part(name="long prompts", requests=requests, arrivals=np.arange(count) + 0.5)

    rows = [Variant(name="chats alone", server="chunks", parts=(closed_loop(size, random),))]
    for name, server in (("whole prompts", "whole"), ("chunks", "chunks")):
        rows.append(Variant(name=name, server=server, parts=(closed_loop(size, random), long_part())))
    return rows


def _texts(size: Size, capacity: float, random: np.random.Generator) -> list[Variant]:
    num_chars, count = TEXT_CHARS * size.context, min(10, max(1, int((size.seconds - 1) * TEXTS_PER_S)))
    texts = [random_text(num_chars, random)[:num_chars] for _ in range(count)]
    requests = [BenchRequest(text, 1, fields={"truncate_prompt_tokens": 16}) for text in texts]
    part = Part(name="texts", requests=requests, arrivals=0.5 + np.arange(count) / TEXTS_PER_S)
    # Short prompts: the pauses of these chats are not those behind the prompts of others.
    asked = [BenchRequest(prompt, 100) for prompt in prompts(np.full(MOST_CHATS, 20), random)]
    chats = Part(name="chats", requests=asked, concurrency=STREAMS)
    return [
        Variant(name="chats alone", server="ours", parts=(chats,)),
        Variant(name="with texts", server="ours", parts=(chats, part)),
    ]


def _prefix(size: Size, capacity: float, random: np.random.Generator) -> list[Variant]:
    rows = []
    for load, shared in (("shared prefix", size.scaled(1500)), ("nothing shared", 0)):
        lengths = np.full(MOST_CHATS // 10, size.scaled(512) + size.scaled(1500) - shared)
        # Both servers get the same requests: what they compute differs by the cache alone.
        requests = [BenchRequest(prompt, 16) for prompt in prompts(lengths, random, shared=shared)]
        part = Part(name=load, requests=requests, concurrency=1)
        rows += [Variant(name=f"{load}, {server}", server=server, parts=(part,)) for server in ("cache", "no cache")]
    return rows


def _bursts(size: Size, capacity: float, random: np.random.Generator) -> list[Variant]:
    rate = capacity / 2
    count = max(2, int(rate * size.seconds))
    rows = []
    for name, burstiness in (("even (Poisson)", 1.0), ("bursts (0.1)", 0.1)):
        arrivals = arrival_times(count, rate=rate, burstiness=burstiness, random=random)
        part = Part(name="chats", requests=chats(size, count, random), arrivals=arrivals)
        rows.append(Variant(name=name, server="ours", parts=(part,)))
    return rows


def _priorities(size: Size, capacity: float, random: np.random.Generator) -> list[Variant]:
    rate = 1.5 * capacity  # the queue grows
    count = max(10, int(rate * size.seconds))
    rows = []
    for name, urgent, patient in (("all alike", PATIENT, PATIENT), ("a tenth is urgent", URGENT, PATIENT)):
        arrivals = arrival_times(count, rate=rate, burstiness=1.0, random=random)
        requests = chats(size, count, random)
        is_urgent = np.arange(count) % 10 == 9
        parts = tuple(
            Part(
                name=part,
                requests=[replace(requests[i], fields={"priority": priority}) for i in np.flatnonzero(which)],
                arrivals=arrivals[which],
            )
            for part, priority, which in (("urgent", urgent, is_urgent), ("patient", patient, ~is_urgent))
        )
        rows.append(Variant(name=name, server="ours", parts=parts))
    return rows


def _targets(size: Size, capacity: float, random: np.random.Generator) -> list[Variant]:
    """Chats at six tenths of the capacity, and a long prompt every four seconds. All servers get the same requests."""
    seconds = size.seconds / TARGET_ROUNDS
    count = max(2, int(0.6 * capacity * seconds))
    arrivals = arrival_times(count, rate=0.6 * capacity, burstiness=1.0, random=random)
    long = np.arange(2.0, max(seconds, 2.1), 4.0)
    lengths = np.full(len(long), size.scaled(7168))
    parts = (
        Part(name="chats", requests=chats(size, count, random), arrivals=arrivals),
        Part(name="long", requests=[BenchRequest(prompt, 16) for prompt in prompts(lengths, random)], arrivals=long),
    )
    return [Variant(name=server, server=server, parts=parts) for server in _target_servers(size)]


def _target_servers(size: Size) -> dict[str, str]:
    """The default, static budgets and the targets."""
    budgets = {f"{size.scaled(tokens)} tokens": size.scaled(tokens) for tokens in (512, 1024, 2048)}
    static = {name: f"{_UNCACHED} --max-num-seqs 48 --max-num-batched-tokens {n}" for name, n in budgets.items()}
    told = f"--target-ttft {TARGETS.ttft_ms:g} --target-itl {TARGETS.itl_ms:g}"
    return {"default": _UNCACHED, **static, "targets": f"{_UNCACHED} {told}"}


def _one_server(size: Size) -> dict[str, str]:
    return {"ours": _UNCACHED}


SCENARIOS = {
    "long-prompts": Scenario(
        servers=lambda size: {
            "chunks": f"{_UNCACHED} --max-num-seqs 40 --max-num-batched-tokens {max(64, size.context // 8)}",
            "whole": f"{_UNCACHED} --max-num-seqs 40 --max-num-batched-tokens {size.context}",
        },
        variants=_long_prompts,
        ratios=(("pauses of the chats, chunks / whole prompts", "itl", "chunks, chats", "whole prompts, chats"),),
    ),
    "texts": Scenario(
        servers=lambda size: {"ours": f"{_UNCACHED} --max-num-seqs 48"},
        variants=_texts,
        rounds=3,
        ratios=(("pauses of the chats, with texts / alone", "itl", "with texts, chats", "chats alone"),),
    ),
    "prefix": Scenario(
        servers=lambda size: {"cache": "", "no cache": _UNCACHED},
        variants=_prefix,
        rounds=3,
        ratios=(
            (
                "time to the first token, with / without cache",
                "ttft",
                "shared prefix, cache",
                "shared prefix, no cache",
            ),
            ("the same where nothing is shared", "ttft", "nothing shared, cache", "nothing shared, no cache"),
        ),
    ),
    "bursts": Scenario(servers=_one_server, variants=_bursts, needs_capacity=True),
    "priorities": Scenario(
        servers=lambda size: {"ours": f"{_UNCACHED} --max-num-seqs 8"},  # so that requests wait
        variants=_priorities,
        needs_capacity=True,
    ),
    "targets": Scenario(
        servers=_target_servers,
        variants=_targets,
        needs_capacity=True,
        rounds=TARGET_ROUNDS,
        targets=TARGETS,
    ),
}
