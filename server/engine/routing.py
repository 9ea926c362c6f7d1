"""Chooses one of several engines for a request, by the cost of its prompt there.

The cost of an engine is a number of tokens, the sum of three parts: MISSING_WEIGHT (2) times the tokens of the prompt
that it has not computed yet, the tokens of its open requests that wait for their first token, and REQUEST_TOKENS for
each open request, which takes time in every step. A missing token counts twice because computing it also delays later
requests, and its page evicts another one. The cheapest engine gets the request. An engine gets no request while it has
more open requests than TIMES_LEAST times those of the least loaded engine, plus MOST_AHEAD.

An engine evicts pages without reporting it here. So the router's knowledge is an estimate, which the answers correct:
each has the number of the prompt's tokens that came from the cache. If fewer were found than expected, the rest has
been evicted, and with it all pages that the engine has used less recently. The router then forgets them.
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
TICK_S = 0.25  # the resolution of the times at which engines have used beginnings


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The engine of a request, and what that engine is expected to have computed."""

    engine: int
    num_prompt: int
    num_known: int  # tokens of the prompt that the engine has computed, or will before this request's turn
    beginnings: Sequence[tuple[int, int]]  # (tokens, digest) of the prompt's beginnings, one block longer each
    used: Sequence[int]  # the time of the engine's last use of each computed one; PROMISED: it will compute this one

    @property
    def num_missing(self) -> int:
        """The number of the prompt's tokens that are to be computed."""
        return self.num_prompt - self.num_known


class Router:
    """Chooses engines, and keeps which engines have computed which beginnings of prompts.

    Args:
        prefixes: the table of beginnings, which several processes may share.
        page_size: tokens of a page in the engines' prefix caches, which keep full pages only; 0: there are no caches.
        clock: returns seconds; all processes must use the same clock.
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
        """Chooses the engine of a request.

        Args:
            prompt: the prompt's tokens, i32[n].
            salt: a number; prompts with different salts share no pages.
            loads: the loads of the engines that can be chosen, by their numbers.
        """
        num_prompt = len(prompt) // 4
        beginnings = list(_beginnings_of(prompt, salt)) if self.page_size else []
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
        """Notes that an engine has computed a request's prompt. Called at the request's first token.

        Args:
            num_cached: the number of the prompt's tokens that were in the engine's cache; None: it was not searched.
        """
        if num_cached is not None:
            expected = zip(route.beginnings, route.used, strict=False)
            gone = [used for (tokens, _), used in expected if tokens > num_cached + self.page_size and used != PROMISED]
            self._prefixes.evicted(route.engine, max(gone, default=PROMISED))
        now = 1 + int(self._clock() / TICK_S)
        for _, digest in route.beginnings:
            self._prefixes.put(digest, route.engine, now)

    def forget(self) -> None:
        """Forgets all beginnings, because the engines' prefix caches are empty."""
        self._prefixes.clear()


def _beginnings_of(prompt: bytes, salt: int) -> Iterator[tuple[int, int]]:
    """Yields (tokens, digest) of the beginnings of a prompt, i32[n], each one block longer than the one before.

    A last block that is not full counts only if it is the first one, because the next turn of a chat would not find it.
    After FINE_TOKENS a block has half as many tokens as the largest power of two up to its start, and BLOCK_TOKENS of
    its tokens, evenly spaced, are hashed. So the work hardly grows with the prompt: 131,072 tokens have 44 blocks.
    """
    tokens = memoryview(prompt).cast("i")
    digest = blake2b(salt.to_bytes(16, "little", signed=True), digest_size=8)
    start = 0
    while start < len(tokens):
        length = BLOCK_TOKENS if start < FINE_TOKENS else (1 << start.bit_length() - 1) // 2
        end = min(start + length, len(tokens))
        if start and end < start + length:
            return
        digest.update(tokens[start : end : length // BLOCK_TOKENS].tobytes())
        yield end, int.from_bytes(digest.copy().digest())
        start = end
