"""Questions between two ends of a bus, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import NoneType

import msgspec
import pytest

from server.bus import PARENT, Bus, NoReplyError


class Add(msgspec.Struct, tag=True):
    left: int
    right: int


class Wait(msgspec.Struct, tag=True):
    """Its reply never comes."""


class Fail(msgspec.Struct, tag=True):
    reason: str


async def answer(question: Add | Wait | Fail, sender: int) -> object:
    match question:
        case Add(left=left, right=right):
            return [left + right, sender]
        case Fail(reason=reason):
            raise NoReplyError(reason)
        case Wait():
            return await asyncio.Event().wait()


async def refusal(asked: Coroutine[None, None, None]) -> str:
    with pytest.raises(NoReplyError) as refused:
        await asked
    return str(refused.value)


def test_either_end_asks_and_each_reply_finds_its_question(tmp_path: Path):
    async def work() -> None:
        ends = {number: Bus(tmp_path / "bus", number, Add | Wait | Fail, answer) for number in (PARENT, 7, 8)}
        parent, first, second = ends.values()
        assert await first.ask(Add(1, 2), list[int]) == [3, 7]
        assert await second.ask(Add(1, 2), list[int]) == [3, 8]
        waiting = asyncio.create_task(refusal(parent.ask(Wait(), NoneType, to=7)))
        sums = [parent.ask(Add(number, 0), list[int], to=7 + number % 2) for number in range(20)]
        assert await asyncio.gather(*sums) == [[number, PARENT] for number in range(20)]
        assert await refusal(first.ask(Fail("no room"), NoneType)) == "no room"
        assert "the parent process has not replied within 0.1 s" in await refusal(
            second.ask(Wait(), NoneType, timeout_s=0.1)
        )
        assert not second._asked._open
        parent.forget(8)
        assert not waiting.done()
        parent.forget(7)
        assert await waiting == "HTTP process 7 has ended"
        for end in ends.values():
            end.close()

    asyncio.run(asyncio.wait_for(work(), 60))
