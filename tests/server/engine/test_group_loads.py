"""What the group knows of its engines: open requests, tokens that wait, and what answers say of their caches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from batcher.request import FinishReason, SamplingParams
from server.engine import wire
from server.engine.group import EngineGroup
from server.engine.routing import Router
from server.shared_counts import Load, Row, SharedCounts

PROMPT = list(range(1000, 1320))
OLD = [9] * 200


class Engine:
    """An engine that keeps what it is sent. Outputs come when a test says so."""

    def __init__(self, on_load: Callable[[int], None]) -> None:
        self.open: list[str] = []
        self.died = asyncio.Event()
        self.on_output: Any = None
        self._on_load = on_load

    async def start(self) -> wire.EngineInfo:
        cache = {"page_size": "16", "enable_prefix_caching": "True"}
        return wire.EngineInfo(max_model_len=4096, vocab_size=2000, cache_config=cache)

    def submit(self, requests) -> None:
        self.open += [request.request_id for request, _ in requests]
        self._on_load(len(self.open))

    def abort(self, request_ids, reason: FinishReason) -> None:
        self.open = [id for id in self.open if id not in request_ids]
        self._on_load(len(self.open))

    async def stop(self) -> None: ...


class Setting:
    """A group of such engines, and the row of its process."""

    def __init__(self, num_engines: int) -> None:
        counts = SharedCounts.made(2, num_engines, 0)
        self.now = 0.0
        self.row, self.router = Row(counts, 1), Router(clock=lambda: self.now)
        self.engines = [Engine(partial(self.row.set_open, number)) for number in range(num_engines)]
        self.group: EngineGroup = EngineGroup(self.engines, self.router, self.row)  # type: ignore[type-var]

    def send(self, id: str, *prompts: list[int]) -> int:
        """The number of the engine that gets requests `id-0`, `id-1` and so on."""
        packed = [wire.packed(prompt) for prompt in prompts]
        requests = [
            wire.WireRequest(f"{id}-{i}", prompt, SamplingParams(max_tokens=9)) for i, prompt in enumerate(packed)
        ]
        self.group.submit([(request, None) for request in requests])  # type: ignore[misc]
        return next(number for number, engine in enumerate(self.engines) if f"{id}-0" in engine.open)

    def queued(self) -> list[int]:
        return [load.num_queued for load in self.row.loads()]

    def answer(self, engine: int, id: str, **fields: Any) -> None:
        self.engines[engine].on_output(wire.Output(id, **({"token_ids": [1]} | fields)))

    def known(self, prompt: list[int]) -> int:
        """Tokens of a prompt that the first engine is known to have."""
        return self.router.choose(wire.packed(prompt), 0, {0: Load(0, 0)}).num_known


@contextlib.contextmanager
def setting_of(num_engines: int) -> Iterator[Setting]:
    with asyncio.Runner() as runner:
        made = Setting(num_engines)
        runner.run(made.group.start())
        yield made
        runner.run(made.group.stop())


@pytest.fixture
def setting() -> Iterator[Setting]:
    with setting_of(2) as made:
        yield made


@pytest.fixture
def alone() -> Iterator[Setting]:
    """With one engine, which has computed 200 tokens, and 320 others later."""
    with setting_of(1) as made:
        for id, prompt in (("old", OLD), ("new", PROMPT)):
            made.send(id, prompt)
            made.answer(0, f"{id}-0")
            made.now += 10
        yield made


def test_tokens_wait_until_the_first_output(setting):
    engine = setting.send("a", PROMPT)
    other = setting.send("b", [5] * 100)
    assert other == 1 - engine
    assert (setting.queued()[engine], setting.queued()[other]) == (320, 100)
    setting.answer(engine, "a-0")
    setting.answer(engine, "a-0")  # later outputs change nothing
    assert (setting.queued()[engine], setting.queued()[other]) == (0, 100)
    setting.answer(other, "b-0", token_ids=[], error="refused", finish_reason="error")
    assert setting.queued() == [0, 0]


def test_a_known_prefix_does_not_wait(setting):
    engine = setting.send("a", PROMPT)
    setting.answer(engine, "a-0")
    assert setting.send("b", [*PROMPT, *range(40)]) == engine
    assert setting.queued()[engine] == 40


def test_the_requests_of_one_submission_wait_each_by_itself(setting):
    engine = setting.send("a", PROMPT, [], [7] * 50)  # the second has the first one's prompt
    assert setting.queued()[engine] == 370
    setting.answer(engine, "a-2")
    assert setting.queued()[engine] == 320


@pytest.mark.parametrize("ids", [["a-0", "a-1"], ["a-1", "a-0", "unknown"]])
def test_an_aborted_request_waits_no_more(setting, ids):
    engine = setting.send("a", PROMPT, [7] * 50)
    setting.group.abort(ids)
    assert setting.queued() == [0, 0]
    setting.answer(engine, "a-0")
    assert setting.queued() == [0, 0]


def test_all_that_can_be_found_is_found(alone):
    alone.send("a", PROMPT)
    alone.answer(0, "a-0", num_cached_tokens=304)  # of 320, in pages of 16: one token at least is computed
    assert (alone.known(OLD), alone.known(PROMPT)) == (192, 320)


@pytest.mark.parametrize("num_found", [0, 16, 240])
def test_what_was_used_before_an_evicted_prefix_is_forgotten(alone, num_found):
    alone.send("a", PROMPT)
    alone.answer(0, "a-0", num_cached_tokens=num_found)
    assert (alone.known(OLD), alone.known(PROMPT)) == (0, 320)  # it has been computed again


@pytest.mark.parametrize(
    "output",
    [
        {"prompt_logprobs": []},
        {"embedding": b"", "token_ids": []},
        {"token_ids": [], "finish_reason": "abort"},
        {"token_ids": [], "finish_reason": "error", "error": "the queue is full"},
    ],
)
def test_a_request_that_has_not_looked_for_a_prefix_says_nothing_of_it(alone, output):
    alone.send("a", PROMPT)
    alone.answer(0, "a-0", **output)
    assert (alone.known(OLD), alone.known(PROMPT)) == (192, 320)
