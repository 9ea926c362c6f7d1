"""Pauses, and updates of the weights, of real engine processes. The tokens tell which weights have made them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from batcher.request import Request, SamplingParams
from server.engine import group, wire
from server.engine.group import EngineGroup, ServerEngine
from server.engine.remote import RemoteEngine
from server.engine.wire import (
    KV_CACHE,
    WEIGHTS,
    ChangePhase,
    ChangeWeights,
    InFolder,
    InSharedMemory,
    Pause,
    PauseMode,
    Phase,
    Resume,
    UpdateStep,
    UpdateWeights,
    WeightsChange,
)
from tests.batcher.fake_runner import expected_tokens
from tests.server.support.real_engine import CAPACITY, RealConfig
from tests.server.support.tokenizers import EOT
from tests.server.support.weights import FakeWeights

TARGET = "tests.server.support.real_engine:build"
BEGIN, RECEIVE, ABANDON = UpdateStep
PREPARE, COMMIT, _ = Phase
PROMPT = (10, 11, 12)


class Listener:
    """A request's receiver: its tokens, each with the version of its weights."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.tokens: list[int] = []
        self.versions: list[str | None] = []
        self.last: wire.Output | None = None
        self._news = asyncio.Event()

    def on_weight_version(self, version: str) -> None:
        assert self.last is None
        self.version = version

    def on_output(self, output: wire.Output) -> None:
        self.last = None if output.finish_reason is None else output
        self.on_tokens(output.token_ids)

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids
        self.versions += [self.version] * len(token_ids)
        self._news.set()

    async def until(self, num_tokens: int) -> None:
        while len(self.tokens) < num_tokens and self.last is None:
            self._news.clear()
            await self._news.wait()

    async def end(self) -> wire.Output:
        await self.until(10**6)
        assert self.last is not None
        return self.last


def foretold(weights: int, num_tokens: int, after: Sequence[int] = ()) -> list[int]:
    """What the weights make of the prompt and the tokens after it."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=0)
    request = Request(request_id="", prompt=(*PROMPT, *after), sampling=sampling, adapter=weights)
    return expected_tokens(request, CAPACITY, (EOT,))


def ask(client: ServerEngine, name: str, num_tokens: int = 300) -> Listener:
    listener = Listener()
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=0)
    client.submit([(wire.WireRequest(name, wire.packed(PROMPT), sampling), listener)])
    return listener


async def told(client: ServerEngine, name: str) -> int:
    """The number of the weights that serve."""
    listener = ask(client, name, 5)
    assert (await listener.end()).finish_reason == "length"
    return next(number for number in range(100) if foretold(number, 5) == listener.tokens)


class RefusedError(Exception):
    """The engine has refused a change."""


async def change(client: ServerEngine, question: wire.AnyQuestion) -> None:
    reply = await client.ask(question)
    if reply.error is not None:
        raise RefusedError(reply.error)


async def take(client: ServerEngine, step: UpdateStep, source: wire.WeightsSource | None = None) -> None:
    """Takes one step of an update."""
    await change(client, UpdateWeights(step, source))


async def update(client: ServerEngine, number: int, version: str = "") -> None:
    await take(client, BEGIN)
    await take(client, RECEIVE, InFolder(str(number)))
    await finish(client, version)


async def finish(client: ServerEngine, version: str = "") -> None:
    await change(client, ChangeWeights(WeightsChange.UPDATE, version=version))


def reload(number: int) -> ChangeWeights:
    return ChangeWeights(WeightsChange.RELOAD, str(number))


async def refusal(asked: Coroutine[None, None, None]) -> str:
    with pytest.raises(RefusedError) as refused:
        await asked
    return str(refused.value)


async def pause_there(client: RemoteEngine, mode: PauseMode) -> None:
    """Pauses an engine that is `held_at` a step: the pause comes while the step is in flight. The request whose abort
    ends it is not in it."""
    ask(client, "held")

    async def let_go() -> None:
        client.abort(["held"])

    async def let_go_after() -> None:  # as deep as `ask`: it sends after it
        await asyncio.shield(let_go())

    await asyncio.gather(change(client, Pause(mode)), let_go_after())


async def paused(client: RemoteEngine) -> Listener:
    """A request of an engine that is `held_at` a step, and has paused in the midst of it."""
    running = ask(client, "a")
    await running.until(3)
    await pause_there(client, PauseMode.KEEP)
    assert 3 <= len(running.tokens) < 300
    return running


async def begin_twice(client: RemoteEngine) -> None:
    await take(client, BEGIN)
    await take(client, BEGIN)


@asynccontextmanager
async def engine(held_at: int | None = None, **faults: object) -> AsyncIterator[RemoteEngine]:
    config = RealConfig(weights=FakeWeights(**faults), held_at=held_at)
    client = RemoteEngine.spawn(TARGET, config, report=lambda line: None)
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


@asynccontextmanager
async def two_engines(held_at: int | None = None, **faults: object) -> AsyncIterator[EngineGroup]:
    """The second one has the faults."""
    configs = [RealConfig(weights=weights, held_at=held_at) for weights in (FakeWeights(), FakeWeights(**faults))]
    pair = EngineGroup([RemoteEngine.spawn(TARGET, config, report=lambda line: None) for config in configs])
    try:
        await pair.start()
        yield pair
    finally:
        await pair.stop()


def run(work: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def test_a_request_goes_on_with_the_new_weights_and_knows_which_token_is_whose():
    async def work() -> None:
        async with engine(held_at=8) as client:
            listener = ask(client, "a")
            await listener.until(3)
            await pause_there(client, PauseMode.KEEP)
            assert client.is_paused and client.weight_version == "default"
            num_old = len(listener.tokens)
            await update(client, 7, "step-7")
            assert client.weight_version == "step-7" and len(listener.tokens) == num_old < 300
            await change(client, Resume())
            assert not client.is_paused
            await listener.end()
            old = foretold(0, num_old)
            assert listener.tokens == old + foretold(7, 300 - num_old, after=old)
            assert listener.versions == ["default"] * num_old + ["step-7"] * (300 - num_old)
            await update(client, 8)
            assert client.weight_version == "2" and await told(client, "b") == 8
            await change(client, ChangeWeights(WeightsChange.RELOAD, "9"))
            assert client.weight_version == "9" and await told(client, "c") == 9
            await change(client, ChangeWeights(WeightsChange.RELOAD))
            assert client.weight_version == "default" and await told(client, "d") == 0

    run(work())


def test_steps_in_another_order_are_refused_and_the_old_weights_serve(tmp_path: Path):
    async def work() -> None:
        block = tmp_path / "block"
        block.write_text("5")
        async with engine(wrong=(3,), unplaceable=(4,), uncommittable=(6,)) as client:
            step = partial(take, client)
            for early in (step(RECEIVE, InFolder("5")), finish(client)):
                refused = await refusal(early)
                assert "no update of the weights has begun: POST /start_weight_update" in refused
            await step(ABANDON)
            await step(BEGIN)
            assert "has begun already" in await refusal(step(BEGIN))
            assert "nothing has been received" in await refusal(finish(client))
            assert "source: it is missing" in await refusal(step(RECEIVE))
            for kind in (WeightsChange.RELOAD, WeightsChange.SLEEP):
                refused = await refusal(change(client, ChangeWeights(kind)))
                assert "an update of the weights is under way: POST /finish_weight_update" in refused
            for number, words in ((3, "3 is not finite"), (4, "there is no room for 4")):
                await step(RECEIVE, InFolder(str(number)))
                assert await refusal(finish(client)) == words
                assert await told(client, f"a{number}") == 0
            await step(RECEIVE, InSharedMemory(str(block), ()))
            assert "from a folder or as arrays, not as both" in await refusal(finish(client))
            await step(RECEIVE, InFolder("6"))
            await step(ABANDON)
            await step(BEGIN)
            await step(RECEIVE, InFolder("6"))
            assert await refusal(finish(client)) == "there are no scales for 6"
            assert "no update of the weights has begun" in await refusal(finish(client))
            assert client.weight_version == "default" and await told(client, "b") == 0
            await step(BEGIN)
            await step(RECEIVE, InSharedMemory(str(block), ()))
            await finish(client)
            assert client.weight_version == "1" and await told(client, "c") == 5

    run(work())


def test_an_engine_serves_pauses_and_hears_while_it_receives(tmp_path: Path):
    async def work() -> None:
        fifo = tmp_path / "weights"
        os.mkfifo(fifo)
        async with engine() as client:
            await take(client, BEGIN)
            receiving = asyncio.create_task(take(client, RECEIVE, InSharedMemory(str(fifo), ())))
            assert await told(client, "a") == 0
            await change(client, Pause(PauseMode.WAIT))
            await change(client, Resume())
            assert not receiving.done()
            finishing = asyncio.create_task(finish(client))  # waits for its turn
            await asyncio.to_thread(fifo.write_text, "7")
            await receiving
            await finishing
            assert await told(client, "b") == 7

    run(work())


def test_no_step_runs_while_a_change_is_prepared():
    async def work() -> None:
        async with engine(held_at=8) as client:
            running = await paused(client)
            num_old = len(running.tokens)
            await change(client, ChangePhase(PREPARE, reload(7)))
            await change(client, Resume())
            waiting = ask(client, "b", 5)
            assert "has begun already" in await refusal(begin_twice(client))  # it hears meanwhile
            assert len(running.tokens) == num_old and not waiting.tokens
            await change(client, ChangePhase(COMMIT, reload(7)))
            await running.end()
            await waiting.end()
            old = foretold(0, num_old)
            assert running.tokens == old + foretold(7, 300 - num_old, after=old)
            assert waiting.tokens == foretold(7, 5)

    run(work())


def test_an_engine_whose_asker_never_decides_goes_on_with_the_old_weights():
    async def work() -> None:
        async with engine(held_at=8) as client:
            running = await paused(client)
            assert (await client.ask(wire.ChangePhase(PREPARE, reload(7), hold_s=0.1))).error is None
            await change(client, Resume())
            await running.end()
            assert running.tokens == foretold(0, 300)
            assert "no change of the weights is prepared" in await refusal(
                change(client, ChangePhase(COMMIT, reload(7)))
            )
            await change(client, reload(8))
            assert client.weight_version == "8" and await told(client, "b") == 8

    run(work())


def test_each_mode_of_a_pause_does_its_own_with_what_runs():
    async def work() -> None:
        for mode in (PauseMode.WAIT, PauseMode.ABORT):
            async with engine(held_at=8) as client:
                running = ask(client, "a")
                await running.until(3)
                await pause_there(client, mode)
                last = running.last
                assert last is not None and last.error is None and running.tokens == foretold(0, len(running.tokens))
                assert last.finish_reason == ("abort" if last.by_pause else "length")
                assert last.by_pause == (len(running.tokens) < 300) == (mode is PauseMode.ABORT)
                late = ask(client, "b", 5)
                await change(client, Resume())
                await late.end()
                assert late.tokens == foretold(0, 5)

    run(work())


async def state(client: RemoteEngine, name: str | None) -> None:
    """Waits until the statistics tell that the engine is in this state and in no other."""
    expected = {each: int(each == name) for each in ("awake", "weights_offloaded", "discard_all")}
    while client.stats.sleep_states != expected:
        await asyncio.sleep(0.01)


def test_a_pause_that_waits_is_ended_by_a_resume():
    async def work() -> None:
        async with engine(held_at=8) as client:
            running = ask(client, "a")
            await running.until(3)
            await pause_there(client, PauseMode.KEEP)
            await state(client, "awake")
            await change(client, ChangeWeights(WeightsChange.SLEEP))  # now it cannot end
            await state(client, "weights_offloaded")
            error, _ = await asyncio.gather(refusal(change(client, Pause(PauseMode.WAIT))), change(client, Resume()))
            assert "resumed" in error and not client.is_paused
            await change(client, ChangeWeights(WeightsChange.WAKE_UP, parts=(WEIGHTS,)))
            assert client.missing == {KV_CACHE}
            await state(client, None)
            await change(client, ChangeWeights(WeightsChange.WAKE_UP))
            assert not client.missing
            await state(client, "awake")
            await change(client, ChangeWeights(WeightsChange.SLEEP, level=2))
            await change(client, ChangeWeights(WeightsChange.SLEEP))  # what was dropped stays dropped
            await state(client, "discard_all")
            await change(client, ChangeWeights(WeightsChange.WAKE_UP))
            await running.end()
            assert running.tokens == foretold(0, 300)

    run(work())


def test_a_process_that_comes_later_knows_the_weights(tmp_path: Path):
    async def work() -> None:
        async with engine(held_at=8) as client:
            await update(client, 5, "five")
            other = RemoteEngine(client.commands, f"ipc://{tmp_path / 'events'}", api_server=1)
            await other.start()
            assert other.weight_version == "five"
            listener = ask(other, "a")
            await listener.until(3)
            await pause_there(client, PauseMode.KEEP)
            await update(client, 6, "six")
            await change(client, Resume())
            await listener.end()
            assert other.weight_version == "six"
            num_old = listener.versions.count("five")
            old = foretold(5, num_old)
            assert listener.versions == ["five"] * num_old + ["six"] * (300 - num_old)
            assert listener.tokens == old + foretold(6, 300 - num_old, after=old)
            await other.stop()

    run(work())


def test_an_engine_that_dies_answers_the_update():
    async def work() -> None:
        async with engine(deadly=(5,)) as client:
            assert "the device is lost" in await refusal(update(client, 5))
            await client.died.wait()
            for asked in (take(client, BEGIN), change(client, Pause(PauseMode.ABORT)), change(client, Resume())):
                assert "The engine has failed" in await refusal(asked)

    run(work())


def test_an_engine_that_cannot_change_its_weights_says_so():
    async def work() -> None:
        client = RemoteEngine.spawn(TARGET, RealConfig(), report=lambda line: None)
        await client.start()
        for asked in (take(client, BEGIN), change(client, Pause(PauseMode.ABORT))):
            assert "cannot pause or change its weights" in await refusal(asked)
        await client.stop()

    run(work())


def test_several_engines_commit_together_or_not_at_all():
    async def work() -> None:
        async with two_engines(wrong=(3,)) as pair:
            await change(pair, Pause(PauseMode.KEEP))
            assert pair.is_paused and all(one.is_paused for one in pair.engines)
            await change(pair, Resume())
            assert not pair.is_paused
            await update(pair, 5, "five")
            assert pair.weight_version == "five"
            assert [await told(one, f"a{i}") for i, one in enumerate(pair.engines)] == [5, 5]
            await take(pair, BEGIN)
            assert "has begun already" in await refusal(take(pair, BEGIN))
            await take(pair, RECEIVE, InFolder("3"))
            assert await refusal(finish(pair)) == "engine 1: 3 is not finite"
            await take(pair, RECEIVE, InFolder("4"))
            assert "has begun already" in await refusal(take(pair, BEGIN))  # does not undo the first
            await finish(pair)
            assert [await told(one, f"b{i}") for i, one in enumerate(pair.engines)] == [4, 4]
            assert pair.split is None

    run(work())


def test_an_update_that_one_of_several_engines_cannot_begin_is_begun_by_none():
    async def work() -> None:
        async with two_engines() as pair:
            await take(pair.engines[1], BEGIN)
            for _ in range(2):
                assert (await refusal(take(pair, BEGIN))).startswith("engine 1: an update of the weights has begun")

    run(work())


def test_what_one_of_several_engines_refuses_none_does_and_their_requests_go_on():
    async def work() -> None:
        async with two_engines(held_at=8, unplaceable=(4,)) as pair:
            await update(pair, 3)
            running = [await paused(one) for one in pair.engines]
            assert await refusal(change(pair, reload(4))) == "engine 1: there is no room for 4"
            await change(pair, Resume())
            for listener in running:
                await listener.end()
                assert listener.tokens == foretold(3, 300)
            await update(pair, 5)
            assert pair.split is None and pair.weight_version == "2"
            assert [await told(one, f"a{i}") for i, one in enumerate(pair.engines)] == [5, 5]

    run(work())


def test_engines_do_not_wait_for_another_that_prepares_for_too_long(monkeypatch):
    async def work() -> None:
        async with two_engines() as pair:
            monkeypatch.setattr(group, "DECIDE_S", 0.0)
            assert "not all engines were prepared within" in await refusal(change(pair, reload(4)))
            monkeypatch.undo()
            assert [await told(one, f"a{i}") for i, one in enumerate(pair.engines)] == [0, 0]
            await change(pair, reload(5))
            assert [await told(one, f"b{i}") for i, one in enumerate(pair.engines)] == [5, 5]

    run(work())


@pytest.mark.parametrize(
    ("faults", "words"),
    [({"uncommittable": (4,)}, "there are no scales for 4"), ({"killing": (4,)}, "the engine process has ended")],
)
def test_engines_of_which_only_some_have_committed_must_not_go_on(faults, words):
    async def work() -> None:
        async with two_engines(**faults) as pair:
            assert words in await refusal(update(pair, 4))
            assert pair.split is not None and f"engine 1: {words}" in pair.split.replace("The engine has failed: ", "")
            assert pair.died.is_set() and pair.death is not None and pair.split in pair.death

    run(work())


def test_an_engine_that_dies_between_the_phases_ends_the_group():
    async def work() -> None:
        async with two_engines() as pair:
            first, second = pair.replicas
            await change(pair, ChangePhase(PREPARE, reload(4)))
            second._process.kill()
            await pair.died.wait()
            assert "engine 1: The engine has failed" in await refusal(change(pair, ChangePhase(COMMIT, reload(4))))
            assert pair.death is not None and "engine 1: the engine process has ended" in pair.death
            assert await told(first, "a") == 4  # no step of it waits any more

    run(work())


def test_a_group_of_a_group_and_an_engine_is_one_engine():
    async def work() -> None:
        faults = FakeWeights(), FakeWeights(), FakeWeights(wrong=(3,))
        first, second, third = (
            RemoteEngine.spawn(TARGET, RealConfig(weights=own), report=lambda line: None) for own in faults
        )
        group = EngineGroup([first, EngineGroup([second, third])])
        try:
            await group.start()
            listeners = [ask(group, f"a{i}", 5) for i in range(6)]
            assert group.num_open == 6 and all(engine.num_open for engine in group.replicas)
            assert [(await one.end()).finish_reason for one in listeners] == ["length"] * 6
            await change(group, Pause(PauseMode.KEEP))
            assert all(engine.is_paused for engine in group.replicas)
            await change(group, Resume())
            await update(group, 5, "five")
            assert [await told(engine, f"b{i}") for i, engine in enumerate(group.replicas)] == [5] * 3
            assert await refusal(update(group, 3)) == "engine 1: engine 1: 3 is not finite"
            await take(group, ABANDON)
            await change(group, ChangeWeights(WeightsChange.SLEEP))
            assert group.missing == {WEIGHTS, KV_CACHE}
            await change(group, ChangeWeights(WeightsChange.WAKE_UP))
            assert group.weight_version == "five" and await told(group, "c") == 5
            third.die("it was lost")
            await group.died.wait()
            assert group.death == "engine 1: engine 1: it was lost"
            assert "The engine has failed" in await refusal(change(group, Resume()))
        finally:
            await group.stop()

    run(work())
