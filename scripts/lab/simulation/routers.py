"""Other ways to choose an engine, for a comparison with the server's own router."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping

from server.engine.routing import BLOCK_TOKENS, Route, Router
from server.shared_counts import Load


class RoundRobin(Router):
    """Each engine in its turn."""

    _next = 0

    def choose(self, prompt: bytes, salt: int, loads: Mapping[int, Load]) -> Route:
        """The next engine."""
        engine, self._next = self._next, (self._next + 1) % len(loads)
        return _unweighed(engine, prompt)

    def learn(self, route: Route, num_cached: int | None) -> None:
        """Nothing is remembered."""


class LeastLoaded(RoundRobin):
    """The engine with the fewest open requests."""

    def choose(self, prompt: bytes, salt: int, loads: Mapping[int, Load]) -> Route:
        """Chooses the first of several engines with equally few requests."""
        return _unweighed(min(loads, key=lambda engine: loads[engine].num_open), prompt)


class LastSent(LeastLoaded):
    """The engine that was last sent the longest beginning of the prompt, in blocks of 64 tokens and up to 2,048, unless
    it has 8 open requests more than the least loaded one and 1.5 times as many: what the server did before 2026-11."""

    def __init__(self, *, page_size: int = BLOCK_TOKENS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(page_size=page_size, clock=clock)
        self._last: dict[int, int] = {}  # digest -> engine

    def choose(self, prompt: bytes, salt: int, loads: Mapping[int, Load]) -> Route:
        """Nothing is known of evictions, nor of the tokens that wait."""
        tokens, digests = array("i", prompt), [hash(salt)]
        for start in range(0, min(len(tokens), 2048) - 63, 64):
            digests.append(hash((digests[-1], tuple(tokens[start : start + 64]))))
        least = super().choose(prompt, salt, loads).engine
        known = next((self._last[digest] for digest in reversed(digests[1:]) if digest in self._last), least)
        limit = max(loads[least].num_open + 8, 1.5 * loads[least].num_open)
        engine = known if loads[known].num_open <= limit else least
        self._last |= dict.fromkeys(digests[1:], engine)
        return _unweighed(engine, prompt)


def _unweighed(engine: int, prompt: bytes) -> Route:
    return Route(engine=engine, num_prompt=len(prompt) // 4, num_known=0, beginnings=(), used=())


ROUTERS: dict[str, type[Router]] = {
    "round robin": RoundRobin, "least loaded": LeastLoaded, "last sent": LastSent, "prefix": Router,
}  # fmt: skip
