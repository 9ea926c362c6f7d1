"""Chooses one of several engines for a request, by what its prompt costs there.

The cost of an engine is in tokens: those of the prompt that it has not computed yet, twice; those of its open requests
that wait for their first token; and REQUEST_TOKENS for each open request, which takes its time of every step. A token
that is computed counts twice because it also delays later requests, and its page evicts another. The cheapest engine
gets the request. There is a bound, whatever an engine has computed: it gets no request while it has more open requests
than TIMES_LEAST times those of the least loaded engine, plus MOST_AHEAD.

An engine evicts by itself. So what is known of it is a guess, which its answers correct: each tells how many tokens of
the prompt came from the cache. If less was found than was expected, the rest had been evicted, and with it all that
the engine has used less recently. That is forgotten, too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from server.shared_counts import PROMISED, Load, PrefixTable

BLOCK_TOKENS = 64
FINE_TOKENS = 2048  # tokens of a prompt that are cut into such blocks; those of the rest are longer
MISSING_WEIGHT, REQUEST_TOKENS = 2, 64
TIMES_LEAST, MOST_AHEAD = 2, 8
TICK_S = 0.25  # of the times at which engines have used beginnings


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where a request goes, and what is expected of it there."""

    engine: int
    num_prompt: int
    num_known: int  # tokens of the prompt that the engine has computed, or will before this request's turn
    beginnings: Sequence[tuple[int, int]]  # (tokens, digest) of the prompt's beginnings, one block longer each
    used: Sequence[int]  # when the engine had used those that it has computed; PROMISED: it will compute this one

    @property
    def num_missing(self) -> int:
        """Tokens of the prompt that are to be computed."""
        return self.num_prompt - self.num_known


class Router:
    """Knows which engines have computed which beginnings of prompts.

    Args:
        prefixes: its memory, which several processes may share.
        page_size: tokens, of the engines' caches, which keep full pages only; 0: they keep nothing.
        clock: seconds; the same clock in all these processes.
    """

    def __init__(
        self,
        prefixes: PrefixTable | None = None,
        *,
        page_size: int = BLOCK_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_size = page_size
        self._prefixes = prefixes or PrefixTable()
        self._clock = clock
        self._sent: dict[int, int] = defaultdict(int)  # tokens that this process has sent to each engine

    def choose(self, prompt: bytes, salt: int, loads: Mapping[int, Load]) -> Route:
        """The engine of a request.

        Args:
            prompt: i32[n], its tokens.
            salt: prompts with different ones share nothing.
            loads: of the engines that can be chosen, by their numbers.
        """
        num_prompt = len(prompt) // 4
        beginnings = list(beginnings_of(prompt, salt)) if self.page_size else []
        known = dict.fromkeys(loads, 0)
        used: dict[int, list[int]] = {engine: [] for engine in loads}
        holders = set(loads)
        for tokens, digest in beginnings:
            found = self._prefixes.get(digest)
            holders &= found.keys()
            if not holders:
                break
            for engine in holders:
                known[engine] = tokens
                used[engine].append(found[engine])
        limit = TIMES_LEAST * min(load.num_open for load in loads.values()) + MOST_AHEAD

        def cost(engine: int) -> tuple[int, int, int]:
            load = loads[engine]
            computed = MISSING_WEIGHT * (num_prompt - known[engine]) + load.num_queued
            return computed + REQUEST_TOKENS * load.num_open, load.num_open, self._sent[engine]

        chosen = min((e for e, load in loads.items() if load.num_open <= limit), key=cost)
        self._sent[chosen] += num_prompt - known[chosen]
        for _, digest in beginnings[len(used[chosen]) :]:
            self._prefixes.put(digest, chosen, PROMISED)
        return Route(
            engine=chosen, num_prompt=num_prompt, num_known=known[chosen], beginnings=beginnings, used=used[chosen]
        )

    def learn(self, route: Route, num_cached: int | None) -> None:
        """A request has its first token: the engine has computed its prompt.

        Args:
            num_cached: tokens of the prompt that the engine has found in its cache; None: it has not looked.
        """
        if num_cached is not None:
            expected = zip(route.beginnings, route.used, strict=False)
            gone = [used for (tokens, _), used in expected if tokens > num_cached + self.page_size and used != PROMISED]
            self._prefixes.evicted(route.engine, max(gone, default=PROMISED))
        now = 1 + int(self._clock() / TICK_S)
        for _, digest in route.beginnings:
            self._prefixes.put(digest, route.engine, now)

    def forget(self) -> None:
        """The engines' prefix caches are empty."""
        self._prefixes.clear()


def beginnings_of(prompt: bytes, salt: int, fine_tokens: int = FINE_TOKENS) -> Iterator[tuple[int, int]]:
    """(tokens, digest) of the beginnings of a prompt, i32[n], one block longer each. A last block that is not full
    counts for a short prompt only: the next turn of a chat would not find it.

    Behind `fine_tokens` a block is a half of the power of two below its start, and BLOCK_TOKENS of its tokens, evenly
    spaced, stand for it. So the work hardly grows with the prompt: 131,072 tokens have 44 blocks.
    """
    tokens = memoryview(prompt).cast("i")
    digest = blake2b(salt.to_bytes(16, "little", signed=True), digest_size=8)
    start = 0
    while start < len(tokens):
        length = BLOCK_TOKENS if start < fine_tokens else (1 << start.bit_length() - 1) // 2
        end = min(start + length, len(tokens))
        if start and end < start + length:
            return
        digest.update(tokens[start : end : length // BLOCK_TOKENS].tobytes())
        yield end, int.from_bytes(digest.copy().digest())
        start = end
