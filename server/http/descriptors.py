"""How many files and sockets the process may have open, and how many of those are for clients."""

from __future__ import annotations

import logging
import os
import resource

logger = logging.getLogger("pallas_serve")

MOST_DESCRIPTORS = 2**20  # of an unlimited number
RESERVE = 16  # for the engine's connections, and for what is opened for a moment
MOST_CONNECTIONS = 8192  # where the system would allow more: they take memory too


def raise_limit() -> None:
    """Raises the process's own limit of descriptors as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # the kernel's own limit may be lower than the "hard" one
            logger.warning("the limit of open files stays at %d: %s", soft, error)


def connection_limit(asked: int | None, num_refusals: int) -> int:
    """The number of connections to serve at once: those asked for, or as many as descriptors are left for.

    `num_refusals` descriptors more are needed, for connections beyond the limit while they are told so. To be called
    when nearly all else is open. Raises ValueError where there are too few.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/dev/fd"))
    left = MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit - num_open - RESERVE - num_refusals
    if left < (asked or 1):
        needed = (asked or 1) + limit - left
        what = "a connection" if asked is None else f"--max-connections {asked}"
        raise ValueError(f"no room for {what}: {limit} open files are allowed and {needed} needed; raise `ulimit -n`")
    return asked or min(left, MOST_CONNECTIONS)
