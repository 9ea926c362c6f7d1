from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from server.api.worker_threads import BLOCK_BYTES, LONG_WORK, NUM_THREADS, blocks, in_thread

PIECE = b"a" * BLOCK_BYTES  # a whole block


@pytest.mark.parametrize(("size", "is_in_thread"), [(LONG_WORK - 1, False), (LONG_WORK, True)])
def test_long_work_is_done_in_a_thread(size, is_in_thread):
    async def worker() -> int:
        return await in_thread(size, threading.get_ident)

    assert (asyncio.run(worker()) != threading.get_ident()) == is_in_thread


def test_a_short_answer_is_one_block():
    async def run() -> list[tuple[bytes, bool]]:
        return [item async for item in blocks(iter([b"a", b"b", b"c"]))]

    assert asyncio.run(run()) == [(b"abc", False)]


def test_an_answer_of_one_piece_is_one_block_however_busy_the_process_is(monkeypatch):
    monkeypatch.setattr("server.api.worker_threads.LONG_S", -1.0)

    async def work(*pieces: bytes) -> list[tuple[bytes, bool]]:
        return [item async for item in blocks(iter(pieces))]

    assert asyncio.run(work(b"a")) == [(b"a", False)]
    assert asyncio.run(work(b"a", b"b", b"c")) == [(b"ab", True), (b"c", False)]


def test_the_rest_of_a_long_answer_is_made_in_few_threads_while_the_loop_turns():
    makers: set[int] = set()
    go_on = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield PIECE  # on the event loop
        assert go_on.wait(30)  # set by the event loop
        for _ in range(20):
            makers.add(threading.get_ident())
            yield PIECE

    async def run() -> None:
        async def read() -> list[bytes]:
            return [block async for block, _ in blocks(pieces())]

        works = [asyncio.create_task(read()) for _ in range(20)]
        await asyncio.sleep(0)
        go_on.set()
        assert [b"".join(blocks) for blocks in await asyncio.gather(*works)] == [PIECE * 21] * 20

    asyncio.run(run())
    assert threading.get_ident() not in makers and len(makers) <= NUM_THREADS


def test_work_that_nobody_wants_any_more_ends():
    made = []

    def pieces() -> Iterator[bytes]:
        while True:
            made.append(PIECE)
            yield PIECE

    async def run() -> None:
        task = asyncio.current_task()
        async for _ in blocks(pieces()):
            if len(made) == 3:
                task.cancel()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert len(made) <= 4  # one more may have begun
