"""Clients of a server of several HTTP processes, each kept on a process that the test knows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil

from tests.server.support.running import RunningServer


def http_processes(server: RunningServer, num_engines: int = 1) -> list[psutil.Process]:
    """In the order in which they were started. The engines are started before them."""
    return server.engine_processes()[num_engines:]


@contextlib.contextmanager
def through_each(server: RunningServer, num_engines: int = 1, **options: Any) -> Iterator[list[httpx.Client]]:
    """A client for each HTTP process, in their order. A client's one connection stays open between its requests."""
    processes = http_processes(server, num_engines)
    found: dict[int, httpx.Client] = {}  # by process id
    deadline = time.monotonic() + 30
    with contextlib.ExitStack() as stack:
        while len(found) < len(processes):
            assert time.monotonic() < deadline, "all connections went to the same processes"
            for other in found.values():  # the server closes connections that are idle for seconds
                other.get("/live")
            client = stack.enter_context(server.http(**options))
            stream = client.get("/live").extensions["network_stream"]
            own = stream.get_extra_info("socket").getsockname()
            pid = next(process.pid for process in processes if own in peers_of(process))
            if pid in found:
                client.close()
            else:
                found[pid] = client
        yield [found[process.pid] for process in processes]


def peers_of(process: psutil.Process) -> list[tuple[str, int]]:
    """The addresses at the other ends of its connections."""
    return [tuple(c.raddr) for c in process.net_connections("tcp") if c.raddr]
