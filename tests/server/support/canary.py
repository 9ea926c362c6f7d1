"""A client that asks for /health over and over, in a process of its own, and says how long it had to wait at worst.

The bound is 250 ms on a machine that has time for the server. The kernel's own accounts tell what part of a wait other
work has caused, and that part is subtracted: how long the server's threads and the canary were ready to run and had no
CPU (`schedstat`), and how long the host of a virtual machine ran others in its place (`steal`).
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:  # the canary's process needs no client library
    from tests.server.support.running import RunningServer

ROOT = Path(__file__).parents[3]
BOUND_S = 0.25
PAUSE_S = 0.005
REQUEST = b"GET /health HTTP/1.1\r\nHost: canary\r\n\r\n"


@contextlib.contextmanager
def canary(server: RunningServer) -> Iterator[None]:
    """Nobody else may have to wait for what happens within: AssertionError where the canary had to."""
    host, port = server.url.removeprefix("http://").split(":")
    command = [sys.executable, "-m", "tests.server.support.canary", host, port, str(server.process.pid)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield
            said, _ = process.communicate("stop\n", timeout=120)
        finally:
            process.kill()
    worst = json.loads(said)
    assert worst["net_s"] < BOUND_S, f"a request to /health waited: {worst}"


def waited_for_cpu(pids: list[int]) -> float:
    """Seconds that all threads of the processes have been ready to run and not running; 0 on a system that does not
    count them."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
                total += int(task.read_text().split()[1])
    return total / 1e9


def stolen() -> list[float]:
    """Of each CPU, the seconds in which the host has run others. A sum would grow with the number of CPUs."""
    return [getattr(times, "steal", 0.0) for times in psutil.cpu_times(percpu=True)]


def ping(connection: socket.socket, pids: list[int]) -> dict[str, Any]:
    waited, taken, started = waited_for_cpu(pids), stolen(), time.monotonic()
    connection.sendall(REQUEST)
    answer = b""
    while not answer.endswith(b"}"):
        received = connection.recv(4096)
        if not received:
            raise ConnectionError(f"the server has closed the canary's connection: {answer!r}")
        answer += received
    wall = time.monotonic() - started
    others = waited_for_cpu(pids) - waited + max(map(operator.sub, stolen(), taken))
    return {"net_s": max(0.0, wall - others), "wall_s": wall, "answer": answer[:15].decode()}


def main(host: str, port: int, server_pid: int) -> None:
    """Says `ready` after the first answer, and the worst wait once something comes on stdin."""
    pids = [server_pid, os.getpid()]
    with socket.create_connection((host, port)) as connection:
        ping(connection, pids)
        print("ready", flush=True)
        pings = []
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            pings.append(ping(connection, pids))
        pings.append(ping(connection, pids))
    print(json.dumps(max(pings, key=lambda ping: ping["net_s"]) | {"num_pings": len(pings)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
