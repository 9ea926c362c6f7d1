"""Several processes that accept from one socket: here several listeners, whose counts are shared."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

from server.http.connections import Connections
from server.http.listener import Listener
from server.settings import Settings
from server.shared_counts import Row, SharedCounts

SETTINGS = Settings(tokenizer_folder=Path(), model_names=("m",))


class LoopOfTurns(asyncio.SelectorEventLoop):
    """Its time passes with its turns. By the clock, a busy machine would let listeners wait for another one in vain."""

    _turn = 0

    def time(self) -> float:
        return self._turn * 1e-4

    def _run_once(self) -> None:
        self._turn += 1
        super()._run_once()


class Guest(asyncio.Protocol):
    """Enters `connections` when it is made, as the server's protocol does."""

    def __init__(self, connections: Connections, made: list[Guest]) -> None:
        self._connections = connections
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._connections.admit(self)
        self._made.append(self)

    def close_waiting(self) -> None:
        raise AssertionError("there is room")


async def accepted(num_clients: int, busy: frozenset[int] = frozenset(), head_start: int = 0) -> list[int]:
    """How many connections each of three listeners accepts; the busy ones never do. The first has some before."""
    counts = SharedCounts.made(3, 1, 0)
    made: list[list[Guest]] = [[], [], []]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        for number in range(3):
            row = Row(counts, number)
            row.set_connections(0)
            if number not in busy:
                connections = Connections(SETTINGS, 100, row)
                for _ in range(0 if number else head_start):
                    connections.admit(Guest(connections, []))
                own = stack.enter_context(server.dup())
                listener = Listener(own, connections, lambda c=connections, m=made[number]: Guest(c, m))
                stack.callback(listener.close)
        writers = [(await asyncio.open_connection(*server.getsockname()))[1] for _ in range(num_clients)]
        while sum(map(len, made)) < num_clients:
            await asyncio.sleep(0)
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        for guest in [guest for guests in made for guest in guests]:
            guest.transport.close()
        await asyncio.sleep(0)
    return [len(guests) for guests in made]


def shares(*args: Any, **options: Any) -> list[int]:
    return asyncio.run(asyncio.wait_for(accepted(*args, **options), 30), loop_factory=LoopOfTurns)


def test_the_processes_share_the_connections():
    found = shares(60)
    assert max(found) - min(found) <= 1


def test_those_with_fewer_connections_go_first():
    first, *others = shares(40, head_start=40)
    assert first <= 1
    assert max(others) - min(others) <= 1


def test_a_process_that_accepts_none_is_not_waited_for_without_end():
    found = shares(20, frozenset({1}))
    assert found[1] == 0
    assert min(found[0], found[2]) >= 1
