"""The time to the first token of a prefix: computed, on the device, and from files after a restart of the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial

import numpy as np

from scripts.flags.errors import FailedError
from scripts.lab.load.conversations import VOCAB_SIZE
from scripts.lab.load.measured import Measured, measure, together
from scripts.lab.load.page_counts import FILES, counted
from scripts.lab.load.servers import Server
from scripts.lab.load.tiers import Tier, move_slots
from scripts.lab.load.workload import BenchRequest, random_ids

NUM_PREFIXES = 4  # of a round
OUTPUT = 8  # tokens
COMPUTED, IN_POOL, FIRST, LATER = "computed", "in the pool", "first after a restart", "later after a restart"


def restarts(
    start: Callable[[], AbstractContextManager[Server]],
    tier: Tier,
    *,
    prefix_len: int,
    page_size: int,
    rounds: int,
    random: np.random.Generator,
) -> dict[str, list[Measured]]:
    """Rows by their names, each with a measurement for each round: new prefixes are computed and asked for again, one
    after the other, and once more after a restart. llama-server saves its slots before it ends, and restores them.

    Raises FailedError if the pages do not get into files.
    """
    found: dict[str, list[Measured]] = {row: [] for row in (COMPUTED, IN_POOL, FIRST, LATER)}
    slots = range(NUM_PREFIXES)
    with ExitStack() as stack:
        server = stack.enter_context(start())
        one_by_one(server, _requests(tier, 1, 16, random))  # what the process does only once
        for _ in range(rounds):
            asked = _requests(tier, NUM_PREFIXES, prefix_len, random)
            num_before = server.counters()[FILES]
            # A small pool does not hold all prefixes.
            pairs = [(one_by_one(server, [request]), one_by_one(server, [request])) for request in asked]
            for row, parts in zip((COMPUTED, IN_POOL), zip(*pairs, strict=True), strict=True):
                found[row].append(together(parts))
            if tier is Tier.LLAMA:
                move_slots(server, "save", slots)
            else:
                _check_files(server, num_before + NUM_PREFIXES * (prefix_len // page_size))
            stack.close()
            server = stack.enter_context(start())
            if tier is Tier.LLAMA:
                move_slots(server, "restore", slots)
            found[FIRST].append(one_by_one(server, asked[:1]))
            found[LATER].append(one_by_one(server, asked[1:]))
    return found


def one_by_one(server: Server, requests: Sequence[BenchRequest]) -> Measured:
    """One request after the other."""
    return counted(server, partial(measure, requests=requests, max_concurrency=1))


def _requests(tier: Tier, count: int, length: int, random: np.random.Generator) -> list[BenchRequest]:
    prompts = random_ids(np.full(count, length), vocab_size=VOCAB_SIZE, shared_prefix=0, random=random)
    requests = [BenchRequest(prompt, OUTPUT) for prompt in prompts]
    if tier is Tier.LLAMA:
        return [replace(request, fields={"id_slot": slot}) for slot, request in enumerate(requests)]
    return requests


def _check_files(server: Server, least: float) -> None:
    found = server.counters()[FILES]
    if found < least:
        raise FailedError(f"after the last write, {found:.0f} pages are in files, and should be {least:.0f}: {FILES}")
