"""The events of a response in the background. They are kept, and any connection can read them, from any event on."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.answers.answer import STREAM_HEADERS, AsgiResponse, while_connected
from server.api.routes.responses.store import ResponseStore

END = b"\n\n"  # of an event; JSON has no line feeds
POLL_S = 0.05  # between two looks at the events of another process


class EventLog:
    """Splits a stream into events, which have numbers from 0 on."""

    def __init__(self) -> None:
        self.grown = asyncio.Event()  # wakes the readers in this process that wait
        self._rest: list[bytes] = []  # the beginning of an event
        self._count = 0

    def take(self, block: bytes) -> list[tuple[int, bytes]]:
        """The events that are complete with the next block, with their numbers. A block must not end within an event's
        END."""
        self._rest.append(block)
        if END not in block:
            return []
        *events, rest = b"".join(self._rest).split(END)
        self._rest = [rest]
        first, self._count = self._count, self._count + len(events)
        return [(first + i, event + END) for i, event in enumerate(events)]

    def wake(self) -> None:
        """Wakes the readers that wait now."""
        self.grown.set()
        self.grown.clear()


def kept_events(store: ResponseStore, id: str, log: EventLog | None, first: int = 0) -> Response:
    """An answer with the events of a response from the number `first` on. The response goes on if the client
    disconnects.

    Args:
        log: the log of a response that this process makes.
    """

    async def send_all(scope: Scope, receive: Receive, send: Send) -> None:
        number, is_over = first, False
        async with while_connected(receive):
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            while not is_over:
                events, is_over = await store.database.run(store.events, id, number)
                number += len(events)
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": not is_over})
                if not events and not is_over:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for((log or EventLog()).grown.wait(), POLL_S)

    return AsgiResponse(send_all)
