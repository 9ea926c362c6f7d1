"""Questions and replies between the processes of one server.

A question is a msgspec struct. It has a number, and its reply has the same number. The parent and its HTTP processes
ask each other over a `Bus`. An engine's replies come with its other events (`server/engine/remote.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

logger = logging.getLogger("pallas_serve")

PARENT = 0  # the number of the parent's process
TIMEOUT_S = 5.0
_QUESTION, _REPLY, _ERROR = b"?", b"=", b"!"


class NoReplyError(Exception):
    """Another process has not replied. The message names it and the reason."""


class OpenQuestions[R]:
    """The questions that have no reply yet, by their numbers."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._open: dict[int, tuple[int, asyncio.Future[R]]] = {}

    def add(self, to: int = PARENT) -> tuple[int, asyncio.Future[R]]:
        """The number of a new question to a process, and its reply to come."""
        number, replied = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = to, replied
        replied.add_done_callback(lambda _: self._open.pop(number, None))  # also if the wait was cancelled
        return number, replied

    def close(self, number: int, reply: R) -> None:
        """Gives a question its reply. A reply that nobody waits for is dropped."""
        _, replied = self._open.get(number, (PARENT, None))
        if replied is not None and not replied.done():
            replied.set_result(reply)

    def close_all(self, reply: R, to: int = PARENT) -> None:
        """Gives all questions to a process the same reply."""
        for number in [number for number, (asked, _) in self._open.items() if asked == to]:
            self.close(number, reply)


class Bus:
    """One end of the connections between the parent and the HTTP processes. Either end asks and replies.

    Args:
        path: the socket that the parent binds.
        number: of this process; PARENT: the parent.
        questions: the union of the questions that come here.
        answer: makes the reply to a question from the process with this number.
    """

    def __init__(
        self, path: Path, number: int, questions: Any, answer: Callable[[Any, int], Awaitable[object]]
    ) -> None:
        self._answer = answer
        self._decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(questions).decode
        self._asked = OpenQuestions[tuple[bytes, bytes]]()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER if number == PARENT else zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):  # no limits: nothing is dropped, nothing blocks
            self._socket.setsockopt(option, 0)
        if number == PARENT:
            self._socket.bind(f"ipc://{path}")
        else:
            self._socket.setsockopt(zmq.ROUTING_ID, b"%d" % number)
            self._socket.connect(f"ipc://{path}")
        self._tasks = {asyncio.create_task(self._listen())}

    async def ask[R](
        self, question: object, kind: type[R], *, to: int = PARENT, timeout_s: float | None = TIMEOUT_S
    ) -> R:
        """Asks another process and returns its reply, of type `kind`. Raises NoReplyError if it ends, fails, or does
        not reply in time."""
        number, replied = self._asked.add(to)
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(to, _QUESTION, b"%d" % number, msgspec.msgpack.encode(question))
                outcome, body = await replied
        except TimeoutError as error:
            raise NoReplyError(f"{_name(to)} has not replied within {timeout_s:g} s") from error
        finally:
            replied.cancel()
        if outcome == _ERROR:
            raise NoReplyError(body.decode())
        return msgspec.msgpack.decode(body, type=kind)

    def forget(self, process: int) -> None:
        """Ends the questions to a process that has ended."""
        self._asked.close_all((_ERROR, f"{_name(process)} has ended".encode()), process)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._socket.close()
        self._context.term()

    async def _send(self, to: int, *frames: bytes) -> None:
        await self._socket.send_multipart(frames if to == PARENT else (b"%d" % to, *frames))

    async def _listen(self) -> None:
        while True:
            *sender, what, number, body = await self._socket.recv_multipart()
            if what == _QUESTION:
                task = asyncio.create_task(self._reply(int(sender[0]) if sender else PARENT, number, body))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._asked.close(int(number), (what, body))

    async def _reply(self, to: int, number: bytes, question: bytes) -> None:
        try:
            reply = _REPLY, number, msgspec.msgpack.encode(await self._answer(self._decode(question), to))
        except Exception as error:
            if not isinstance(error, NoReplyError):
                logger.exception("a question of %s has failed", _name(to))
            reply = _ERROR, number, str(error).encode()
        await self._send(to, *reply)


def _name(process: int) -> str:
    return "the parent process" if process == PARENT else f"HTTP process {process}"
