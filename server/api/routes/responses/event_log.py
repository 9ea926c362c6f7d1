"""The events of a response in the background. Any connection can read them, from any event on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.answers.answer import STREAM_HEADERS, Sent, unenforced_header, while_connected

END = b"\n\n"  # of an event; JSON has no line feeds
BYTES_OF_AN_EVENT = 150  # in memory, without its text


class EventLog:
    """The events of a response up to now. It grows until it is closed."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._blocks: list[bytes] = []  # of events or parts of one, as they came
        self._starts = [(0, 0)]  # of each event and of the next one: the number of its block, and the place in it
        self._is_closed = False
        self._changed = asyncio.Event()

    def add(self, block: bytes) -> None:
        """Adds events, or a part of one. A block must not end within an event's END."""
        at = block.find(END)
        num_ends = 0
        while at >= 0:
            num_ends += 1
            self._starts.append((len(self._blocks), at + len(END)))
            at = block.find(END, at + len(END))
        self._blocks.append(block)
        self.num_bytes += len(block) + BYTES_OF_AN_EVENT * num_ends
        self._wake()

    def close(self) -> None:
        """Ends the log."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        """Wakes the readers that wait now."""
        self._changed.set()
        self._changed.clear()

    async def read_from(self, number: int) -> AsyncIterator[bytes]:
        """Yields the events from this number on, until the log is closed."""
        while number >= len(self._starts) and not self._is_closed:
            await self._changed.wait()
        if number >= len(self._starts):
            return
        next_block, start = self._starts[number]
        while True:
            while next_block < len(self._blocks):
                if block := self._blocks[next_block][start:]:
                    yield block
                next_block, start = next_block + 1, 0
            if self._is_closed:
                return
            await self._changed.wait()


def logged_events(log: EventLog, first: int = 0, *, unenforced: Sequence[str] = ()) -> Response:
    """An answer with the events of a log from a number on. The response goes on if the client disconnects."""
    headers = [*STREAM_HEADERS, *unenforced_header(unenforced)]

    async def send_all(scope: Scope, receive: Receive, send: Send) -> None:
        async with while_connected(receive):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for block in log.read_from(first):
                await send({"type": "http.response.body", "body": block, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return Sent(send_all)
