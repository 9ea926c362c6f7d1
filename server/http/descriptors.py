"""The process's file descriptors: the standard streams, the limit, and the number of connections that it allows."""

from __future__ import annotations

import logging
import os
import resource
import sys

logger = logging.getLogger("pallas_serve")

MOST_DESCRIPTORS = 2**20  # even if the system sets no limit
LEAST_DESCRIPTORS = 64  # that a server and its engine need; with fewer, ZeroMQ ends the process
RESERVE = 16  # for the engine's connections, and for files that are open for a moment
NUM_REFUSALS = 8  # connections beyond the limit that may be open while they are refused
MOST_CONNECTIONS = 8192  # the default is at most this: connections take memory too


def open_standard_streams() -> None:
    """Opens the standard streams that the process was started without. Otherwise a file or a socket would get a
    stream's descriptor, and libraries would print into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def raise_limit() -> None:
    """Raises the process's own limit of descriptors as far as the system allows. Raises ValueError if it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # the kernel's own limit may be lower than the "hard" one
            logger.warning("the limit of open files stays at %d: %s", soft, error)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_DESCRIPTORS:
        raise ValueError(f"{soft} open files are allowed, and a server needs {LEAST_DESCRIPTORS}: raise `ulimit -n`")


def connection_limit(asked: int | None) -> int:
    """The number of connections to serve at once: `asked`, or as many as there are free descriptors.

    NUM_REFUSALS more descriptors are kept for connections beyond the limit, while they are refused. Call this function
    when nearly all other files are open. Raises ValueError if there are too few descriptors.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/dev/fd"))
    left = MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit - num_open - RESERVE - NUM_REFUSALS
    if left < (asked or 1):
        needed = (asked or 1) + limit - left
        what = "a connection" if asked is None else f"--max-connections {asked}"
        raise ValueError(f"no room for {what}: {limit} open files are allowed and {needed} needed; raise `ulimit -n`")
    return asked or min(left, MOST_CONNECTIONS)
