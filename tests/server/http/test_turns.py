from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest

from server.http.turns import BLOCK_BYTES, MOST_IN_A_TURN, SharedWork, Turns

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

    async def run() -> None:
        task = asyncio.current_task()
        async for _ in Turns().blocks(pieces()):
            if len(made) == 3:
                task.cancel()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert len(made) == 3


def test_those_who_wait_for_one_result_go_on_in_order_and_few_in_a_turn():
    went_on: list[int] = []
    by_turn: list[int] = []

    async def run() -> None:
        asked = asyncio.Event()

        async def work() -> str:
            await asked.wait()
            return "found"

        shared = SharedWork(work())

        async def wait(number: int) -> str:
            found = await shared.result()
            went_on.append(number)
            return found

        def tick() -> None:
            by_turn.append(len(went_on))
            if len(went_on) < 999:
                asyncio.get_running_loop().call_soon(tick)

        waiting = [asyncio.create_task(wait(number)) for number in range(1000)]
        await asyncio.sleep(0)
        waiting[5].cancel()
        asked.set()
        tick()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(found.pop(5), asyncio.CancelledError)
        assert set(found) == {"found"}
        assert await shared.result() == "found"

    asyncio.run(run())
    assert went_on == [number for number in range(1000) if number != 5]
    assert max(b - a for a, b in pairwise(by_turn)) <= MOST_IN_A_TURN


def test_an_error_of_shared_work_is_raised_by_all_who_wait_and_a_caller_that_leaves_ends_nothing():
    async def run() -> list[object]:
        async def work() -> None:
            await asyncio.sleep(0)
            raise ConnectionError

        shared = SharedWork(work())
        leaving = asyncio.create_task(shared.result())
        await asyncio.sleep(0)
        leaving.cancel()
        found = await asyncio.gather(shared.result(), shared.result(), leaving, return_exceptions=True)
        return [type(error) for error in found]

    assert asyncio.run(run()) == [ConnectionError, ConnectionError, asyncio.CancelledError]
