"""Several engines behind one server, with real processes over real sockets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT, HELLO, LONG, SLOW, wait_until
from tests.server.support.running import ECHO, RunningServer, running_server, server_of
from tests.server.support.sse_events import parse_events

FINISHED = "request_success_total"


def by_engine(server: RunningServer, name: str) -> dict[str, float]:
    with server.http() as http:
        text = http.get("/metrics").text
    found = re.findall(rf'^pallas_serve:{name}{{engine="(\d)",([^}}]*)}} (\S+)$', text, re.MULTILINE)
    return {engine: float(value) for engine, labels, value in found if "reason" not in labels or "length" in labels}


def prompt(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"{number} is the beginning of a chat of its own"}]}


@contextlib.contextmanager
def streams(server: RunningServer, numbers: Iterable[int]) -> Iterator[list[Iterator[str]]]:
    """Streams that have begun, each of the chat with its number."""
    with contextlib.ExitStack() as stack:
        answers = []
        for number in numbers:
            http = stack.enter_context(server.http())
            answer = stack.enter_context(http.stream("POST", CHAT, json=LONG | prompt(number)))
            pieces = answer.iter_text()
            next(pieces)
            answers.append(pieces)
        yield answers


# The last test ends it.
pair = server_of(SLOW, more_engines=(SLOW,))


def test_the_engines_report_under_their_numbers_and_share_the_load(pair):
    assert sorted(pair.lines[:2]) == [f"report: engine {number}: the echo engine is loading" for number in (0, 1)]
    with streams(pair, range(6)):
        wait_until(lambda: by_engine(pair, "num_requests_running") == {"0": 3.0, "1": 3.0})
        with pair.http() as http:
            state = http.get("/ui/state").json()
        assert (state["running"], state["pages"], state["engines"]) == (6, 200, 2)
    # Their clients have closed the connections: the aborts reach the right engines.
    wait_until(lambda: by_engine(pair, "num_requests_running") == {"0": 0.0, "1": 0.0})
    assert by_engine(pair, "engine_alive") == {"0": 1.0, "1": 1.0}
    assert set(by_engine(pair, "time_to_first_token_seconds_count")) == {"0", "1"}


def test_the_page_gets_the_steps_of_the_engine_that_it_asks_for(pair):
    with pair.http() as http, streams(pair, [50]):

        def shown() -> list[str]:
            states = [http.get("/ui/state", params={"engine": number}).json() for number in (0, 1)]
            return sorted(state["steps"][-1]["slots"] for state in states)

        wait_until(lambda: shown() == ["", "d"])
        unknown = http.get("/ui/state", params={"engine": 2})
    assert unknown.status_code == 400
    assert "0 to 1, got 2" in unknown.json()["error"]["message"]


@pytest.mark.parametrize("fields", [[{}] * 5, [{"n": 5}]])
def test_a_chat_and_the_choices_of_a_request_stay_on_one_engine(pair, fields):
    before = by_engine(pair, FINISHED)
    with pair.http() as http:
        for own in fields:
            body = HELLO | {"max_tokens": 2, "ignore_eos": True} | own
            assert http.post(CHAT, json=body).status_code == 200

    def gained() -> list[float]:
        after = by_engine(pair, FINISHED)
        return sorted(after[engine] - before[engine] for engine in after)

    wait_until(lambda: sum(gained()) == 5)
    assert gained() == [0, 5]


def test_an_engine_that_dies_is_named_and_ends_its_own_streams_first(pair):
    def running() -> list[float]:
        return [number for _, number in sorted(by_engine(pair, "num_requests_running").items())]

    with streams(pair, [100]) as (kept_stream,), contextlib.ExitStack() as stack:
        wait_until(lambda: sum(running()) == 1)
        doomed = running().index(0)
        (lost_stream,) = stack.enter_context(streams(pair, [101]))  # a new chat goes to the idle engine
        wait_until(lambda: running() == [1, 1])
        waiting = httpx.Client(base_url=pair.url, timeout=30)
        assert waiting.get("/health").status_code == 200
        pair.engine_processes()[doomed].kill()
        lost = "".join(lost_stream)
        health = waiting.get("/health")
        assert health.status_code == 503
        message = f"engine {doomed}: the engine process has ended (exit code -9): it was killed"
        assert message in health.json()["error"]["message"]
        assert waiting.post(CHAT, json=HELLO).status_code == 503
        assert by_engine(pair, "engine_alive") == {str(doomed): 0.0, str(1 - doomed): 1.0}
        waiting.close()
        # The other engine's stream goes on until the server ends, as in vLLM, and then has an error event, too.
        kept = "".join(kept_stream)
    for text in (lost, kept):
        assert "error" in parse_events(text)[-1]
    assert len(parse_events(kept)) > len(parse_events(lost))
    assert pair.process.wait(30) == 1


ADMIN = {"Authorization": "Bearer boss"}
CHANGING = EchoConfig(weights=True)


def told(http: httpx.Client) -> set[str]:
    """What the engines say to chats that are spread over them."""
    bodies = [HELLO | prompt(number) | {"max_tokens": 8} for number in range(6)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: http.post(CHAT, json=body).json(), bodies))
    return {answer["choices"][0]["message"]["content"] for answer in answers}


def test_all_engines_change_their_weights_or_none(tmp_path):
    second = replace(CHANGING, refused=("bad",))
    with (
        running_server(tmp_path, ECHO, CHANGING, more_engines=(second,), admin_api_keys=("boss",)) as server,
        server.http(headers=ADMIN) as http,
    ):
        assert http.post("/admin/reload", json={"model": "one"}).status_code == 200
        assert told(http) == {"one"}
        refused = http.post("/admin/reload", json={"model": "bad"})
        assert refused.status_code == 400
        assert "The weights were not changed: engine 1: no model bad" in refused.json()["error"]["message"]
        assert told(http) == {"one"}
        for path, sleeps in (("/sleep", True), ("/sleep", True), ("/wake_up", False)):
            assert http.post(path).status_code == 200
            assert http.get("/is_sleeping").json() == {"is_sleeping": sleeps}
        assert http.post("/sleep").status_code == 200
        asleep = http.post("/admin/reload", json={"model": "two"})
        assert asleep.status_code == 400 and "not changed: the engine sleeps" in asleep.json()["error"]["message"]
        assert http.post("/wake_up").status_code == 200 and told(http) == {"one"}


def test_parts_of_all_engines_sleep_or_of_none(tmp_path):
    full = replace(CHANGING, no_room=("kv_cache",))
    with (
        running_server(tmp_path, ECHO, CHANGING, more_engines=(full,), admin_api_keys=("boss",)) as server,
        server.http(headers=ADMIN) as http,
    ):
        assert http.post("/sleep?level=2").status_code == 200
        assert http.post("/wake_up?tags=weights").status_code == 200
        for _ in range(2):
            refused = http.post("/wake_up")
            assert refused.status_code == 400 and "engine 1: there is no room" in refused.json()["error"]["message"]
            assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/admin/reload", json={"model": "one"}).status_code == 200, "their weights are awake"
        assert http.post("/sleep").status_code == 200
        assert http.post("/admin/reload", json={"model": "two"}).status_code == 400


def test_engines_that_are_left_with_different_weights_end_the_server(tmp_path):
    second = replace(CHANGING, uncommittable=("bad",))
    with (
        running_server(tmp_path, ECHO, CHANGING, more_engines=(second,), admin_api_keys=("boss",)) as server,
        server.http(headers=ADMIN) as http,
    ):
        assert http.post("/admin/reload", json={"model": "bad"}).status_code == 400
        health = http.get("/health")
        assert health.status_code == 503
        assert "not all engines have made the change: engine 1: no model bad" in health.json()["error"]["message"]
        assert server.process.wait(30) == 1


def test_one_engine_that_cannot_start_is_named(tmp_path):
    broken = EchoConfig(fail_at_start="chip 7 is missing")
    slow = EchoConfig(start_s=1000.0)
    with (
        pytest.raises(RuntimeError, match="could not start: engine 1: chip 7 is missing"),
        running_server(tmp_path, ECHO, slow, more_engines=(broken,)),
    ):
        pass
