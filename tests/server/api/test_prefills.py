"""Which prompts are sent to other servers, and what becomes of those that these do not compute."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from batcher.page_store import PageSource
from server.api.http_counts import Prefill
from server.api.prefills import MOST_ANSWER_BYTES, PATH, PAUSE_S, KnownBeginnings, RemotePrefills, differing
from server.engine.routing import BLOCK_TOKENS
from server.engine.wire import EngineInfo
from server.settings import Settings
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.running import server_of

THRESHOLD = 2 * BLOCK_TOKENS
IDENTITY = {"weights": "of both"}
INFO = EngineInfo(max_model_len=4096, vocab_size=100, page_identity=IDENTITY)
KEY = "k" * 40
DONE = {"token": base64.b64encode(b"t" * 16).decode(), "port": 77, "key": KEY, "keep_s": 5.0}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Asked:
    """A `RemotePrefills` with what it has counted, and a clock that stands still."""

    def __init__(self, *urls: str, timeout_s: float = 30.0, keys: tuple[str, ...] = ()) -> None:
        settings = Settings(
            tokenizer_folder=Path(),
            model_names=("m",),
            api_keys=keys,
            prefill_url=urls,
            prefill_threshold=THRESHOLD,
            transfer_timeout_s=timeout_s,
        )
        self.now_s = 0.0
        self.counts: Counter[Prefill] = Counter()
        self.prefills = RemotePrefills(
            settings, lambda: INFO, lambda outcome: self.counts.update([outcome]), lambda: self.now_s
        )

    async def source(self, prompt: list[int], left_s: float | None = None, adapter: int = 0) -> PageSource | None:
        packed = array("i", prompt).tobytes()
        sources = await self.prefills.sources([packed], left_s, salt=7, adapter=adapter, model="a", priority=-1)
        return sources[0]


@asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post(PATH, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    finally:
        await runner.cleanup()


def new_prompt(first: int, length: int = THRESHOLD) -> list[int]:
    return list(range(first, first + length))


async def well(request: web.Request) -> web.Response:
    return web.json_response(DONE)


def test_a_long_prompt_is_sent_with_all_that_decides_its_pages() -> None:
    bodies: list[tuple[dict[str, Any], str | None]] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append((await request.json(), request.headers.get("Authorization")))
        return web.json_response(DONE)

    async def ask() -> PageSource | None:
        async with answering(handler) as url:
            return await Asked(url + "/", keys=("first", "second")).source(new_prompt(0), adapter=9)

    source = asyncio.run(ask())
    assert source == PageSource(address="tcp://127.0.0.1:77", key=KEY, token=b"t" * 16, keep_s=5.0)
    ((body, key),) = bodies
    assert key == "Bearer first"
    assert array("i", base64.b64decode(body.pop("tokens"))).tolist() == new_prompt(0)
    assert body == {"cache_salt": 7, "model": "a", "adapter": 9, "priority": -1, "identity": IDENTITY}


def test_short_prompts_and_those_that_are_known_are_computed_here() -> None:
    async def ask() -> tuple[list[bool], Counter[Prefill]]:
        async with answering(well) as url:
            asked = Asked(url)
            first, second = new_prompt(0), new_prompt(1000, THRESHOLD - 1)
            longer = second + new_prompt(0, THRESHOLD)  # the first block of it is known
            prompts = [second, first, first, longer]
            found = [await asked.source(prompt) is not None for prompt in prompts]
            asked.prefills.forget()
            return [*found, await asked.source(new_prompt(0)) is not None], asked.counts

    found, counts = asyncio.run(ask())
    assert found == [False, True, False, True, True]
    assert counts == {Prefill.DONE: 3}


async def refuses(request: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "no, thanks"}}, status=409)


async def gibbers(request: web.Request) -> web.Response:
    return web.Response(body=b"\xff{")


async def redirects(request: web.Request) -> web.Response:
    raise web.HTTPFound("http://127.0.0.1:1/elsewhere")


async def hangs_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def sleeps(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


def answers(**changes: object) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=json.dumps(DONE | changes), content_type="application/json")

    return handler


async def floods(request: web.Request) -> web.Response:
    return web.Response(body=b" " * (2 * MOST_ANSWER_BYTES))


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (answers(keep_s=1e308), "keep_s"),
        (answers(keep_s=0), "keep_s"),
        (answers(keep_s=-1.0), "keep_s"),
        (answers(port=0), "port"),
        (answers(port=65536), "port"),
        (answers(port=2**70), "port"),
        (answers(token="AAAA"), "token"),
        (answers(key="k" * 39), "key"),
        (floods, "more than 65536 bytes"),
        (refuses, "409 no, thanks"),
        (gibbers, "Error"),
        (redirects, "302"),
        (hangs_up, "Disconnected"),
        (sleeps, "no answer within 0.2 s"),
    ],
)
def test_a_server_that_has_failed_is_left_alone_for_a_while(handler, words, caplog) -> None:
    async def ask() -> Counter[Prefill]:
        async with answering(handler) as url:
            asked = Asked(url, timeout_s=0.2)
            assert await asked.source(new_prompt(0)) is None
            assert await asked.source(new_prompt(1000)) is None
            assert asked.counts == {Prefill.FAILED: 1, Prefill.SKIPPED: 1}
            asked.now_s += PAUSE_S
            assert await asked.source(new_prompt(2000)) is None
            return asked.counts

    assert asyncio.run(ask()) == {Prefill.FAILED: 2, Prefill.SKIPPED: 1}
    assert words in caplog.text


def test_the_other_server_is_asked_while_one_has_failed() -> None:
    async def ask() -> Counter[Prefill]:
        async with answering(well) as url:
            asked = Asked("http://127.0.0.1:1", url)
            found = [await asked.source(new_prompt(1000 * n)) is not None for n in range(4)]
            assert found == [False, True, True, True]
            return asked.counts

    assert asyncio.run(ask()) == {Prefill.FAILED: 1, Prefill.DONE: 3}


def test_the_one_with_fewer_prompts_is_asked() -> None:
    num_asked: Counter[int] = Counter()

    def numbered(number: int, all_are_there: asyncio.Event) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            num_asked[number] += 1
            if sum(num_asked.values()) == 4:
                all_are_there.set()
            await all_are_there.wait()
            return web.json_response(DONE)

        return handler

    async def ask() -> None:
        event = asyncio.Event()
        async with answering(numbered(0, event)) as first, answering(numbered(1, event)) as second:
            asked = Asked(first, second)
            await asyncio.gather(*[asked.source(new_prompt(1000 * n)) for n in range(4)])

    asyncio.run(ask())
    assert num_asked == {0: 2, 1: 2}


def test_a_request_waits_no_longer_than_its_deadline() -> None:
    async def ask() -> PageSource | None:
        async with answering(sleeps) as url:
            return await Asked(url).source(new_prompt(0), left_s=0.05)

    assert asyncio.run(ask()) is None


@given(st.lists(st.lists(st.integers(1, 9), max_size=8), max_size=20))
def test_as_much_is_known_as_an_earlier_prompt_began_alike(prompts: list[list[int]]) -> None:
    """Here a digest is of its whole beginning."""
    known, earlier = KnownBeginnings(), []
    for prompt in prompts:
        digests = [int("".join(map(str, prompt[: stop + 1]))) for stop in range(len(prompt))]
        alike = [sum(a == b for a, b in zip(digests, other, strict=False)) for other in earlier]
        assert known.count(digests) == max(alike, default=0)
        known.add(digests)
        earlier.append(digests)


def test_what_differs_is_named() -> None:
    assert differing({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == "b, c"


# --- the route ---

server = server_of(EchoConfig(reply=tuple(range(50)), max_model_len=100), computes_for_others=True)
BODY = {
    "tokens": base64.b64encode(array("i", range(40)).tobytes()).decode(),
    "cache_salt": 0,
    "model": None,
    "adapter": 0,
    "priority": 0,
    "identity": {},
}


def test_each_prompt_has_a_token_of_its_own(server) -> None:
    answers = [server.post(PATH, BODY).json() for _ in range(2)]
    tokens = {base64.b64decode(answer["token"]) for answer in answers}
    assert len(tokens) == 2
    assert {len(token) for token in tokens} == {16}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"identity": {"weights": "others"}}, 409, "weights differ"),
        ({"tokens": ""}, 400, "at least one"),
        ({"tokens": "AAAA"}, 400, "not 3 bytes"),
        ({"tokens": "AAA"}, 400, "tokens"),
        ({"priority": 2**40}, 400, "priority"),
        ({"adapter": 5}, 409, "other weights"),
        ({"model": "nobody"}, 404, "nobody"),
        ({"cache_salt": "x"}, 400, "cache_salt"),
        ({"cache_salt": 2**63}, 400, "cache_salt"),
        ({"cache_salt": 2**64}, 400, "cache_salt"),
        ({"cache_salt": -1}, 400, "cache_salt"),
        ({"adapter": 2**64}, 400, "adapter"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_words(server, change, status, words) -> None:
    answer = server.post(PATH, BODY | change)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]
    assert server.post(PATH, BODY).status_code == 200


def test_the_route_is_described(server) -> None:
    with server.http() as http:
        assert PATH in http.get("/openapi.json").json()["paths"]


plain = server_of(EchoConfig())


def test_other_servers_have_no_such_route(plain) -> None:
    assert plain.post(PATH, BODY).status_code == 404
