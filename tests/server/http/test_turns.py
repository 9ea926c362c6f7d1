from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest

from server.http.turns import BLOCK_BYTES, Turns

PIECE = b"a" * BLOCK_BYTES  # what one turn does


async def read(turns: Turns, pieces: Iterator[bytes]) -> list[bytes]:
    return [block async for block, _ in turns.blocks(pieces)]


def test_short_work_is_done_at_once_and_is_one_block():
    async def run() -> list[tuple[bytes, bool]]:
        return [item async for item in Turns().blocks(iter([b"a", b"b", b"c"]))]

    assert asyncio.run(run()) == [(b"abc", False)]


def test_the_loop_turns_between_two_blocks_however_many_works_there_are():
    pieces_done_by_turn = []

    async def run() -> None:
        turns, done, over = Turns(), 0, False

        def pieces() -> Iterator[bytes]:
            nonlocal done
            for _ in range(20):
                done += 1
                yield PIECE

        def tick() -> None:
            pieces_done_by_turn.append(done)
            if not over:
                asyncio.get_running_loop().call_soon(tick)

        works = [asyncio.create_task(read(turns, pieces())) for _ in range(5)]
        await asyncio.sleep(0)  # the first block of each is made at once
        tick()
        await asyncio.gather(*works)
        over = True

    asyncio.run(run())
    assert pieces_done_by_turn[-1] == 5 * 20
    assert max(b - a for a, b in pairwise(pieces_done_by_turn)) == 1


def test_work_that_nobody_wants_any_more_ends():
    made = []

    def pieces() -> Iterator[bytes]:
        while True:
            made.append(PIECE)
            yield PIECE

    def check() -> None:
        if len(made) == 3:
            raise ConnectionError

    async def run() -> None:
        async for _ in Turns().blocks(pieces(), check):
            pass

    with pytest.raises(ConnectionError):
        asyncio.run(run())
    assert len(made) == 3
