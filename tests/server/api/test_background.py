"""Responses that are made in the background: polled, streamed and resumed, cancelled, counted as any request."""

from __future__ import annotations

import itertools
import signal

import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from server.api.routes.responses.events import EventLog
from server.api.routes.responses.store import MAX_KEPT
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT, HELLO, SLOW, load, running, wait_until
from tests.server.support.running import ECHO, running_server, server_of
from tests.server.support.sse_events import parse_named_events

PATH = "/v1/responses"
TEXT = "abcdefghij"
BODY = {"input": "hello", "background": True}
ENDLESS = BODY | {"ignore_eos": True, "max_output_tokens": 15000}
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)

short = server_of(SLOW)


def started(server, **fields):
    response = server.post(PATH, BODY | fields)
    assert response.status_code == 200, response.text
    Response.model_validate(response.json(), strict=True)
    return response.json()


def polled(server, id: str):
    with server.http() as http:
        response = http.get(f"{PATH}/{id}")
    assert response.status_code == 200, response.text
    Response.model_validate(response.json(), strict=True)
    return response.json()


def ended(server, id: str):
    """The response, once it is over."""
    wait_until(lambda: polled(server, id)["status"] not in ("queued", "in_progress"))
    return polled(server, id)


def test_a_response_is_made_without_a_connection(short):
    client = short.client()
    response = client.responses.create(model="test-model", input="hello", background=True)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    id = response.id
    while (response := client.responses.retrieve(id)).status in ("queued", "in_progress"):
        assert response.output == []
    assert (response.status, response.output_text) == ("completed", TEXT)
    assert response.usage.output_tokens == len(TEXT) + 1
    following = client.responses.create(model="test-model", input="more", previous_response_id=response.id)
    assert following.output_text == TEXT
    wait_until(lambda: load(short) == 0)


def test_a_response_may_end_incomplete(short):
    response = ended(short, started(short, max_output_tokens=3)["id"])
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["content"][0]["text"] == TEXT[:3]


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_a_response_that_is_cancelled_or_deleted_is_not_made_any_more(slow, end):
    client = slow.client()
    id = started(slow, **ENDLESS)["id"]
    wait_until(lambda: polled(slow, id)["status"] == "in_progress")
    assert load(slow) == 1
    wait_until(lambda: running(slow) == 1)
    if end == "cancel":
        assert [client.responses.cancel(id).status for _ in range(2)] == ["cancelled"] * 2
        assert polled(slow, id)["status"] == "cancelled"
    else:
        client.responses.delete(id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)
    wait_until(lambda: load(slow) == 0)
    wait_until(lambda: running(slow) == 0)


def test_a_response_that_newer_ones_displace_is_not_made_any_more(short):
    id = started(short, **ENDLESS)["id"]
    wait_until(lambda: polled(short, id)["status"] == "in_progress")  # the change makes it the newest
    wait_until(lambda: running(short) == 1)
    with short.http() as http:
        for _ in range(MAX_KEPT - 1):
            assert http.post("/v1/conversations", json={}).status_code == 200
        assert http.get(f"{PATH}/{id}").status_code == 200
        assert http.post("/v1/conversations", json={}).status_code == 200
        assert http.get(f"{PATH}/{id}").status_code == 404
    wait_until(lambda: load(short) == 0)
    wait_until(lambda: running(short) == 0)


def test_cancelling_changes_nothing_when_the_response_is_over(short):
    response = ended(short, started(short)["id"])
    with short.http() as http:
        assert http.post(f"{PATH}/{response['id']}/cancel").json() == response


def test_the_events_can_be_read_again_from_any_on(short):
    whole = parse_named_events(short.post(PATH, BODY | {"stream": True}).text)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    for event in whole:
        EVENT.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in whole]
    assert kinds[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert kinds[-1] == "completed"
    assert [event["response"]["status"] for event in whole[:3]] == ["queued", "queued", "in_progress"]
    id = whole[0]["response"]["id"]
    assert whole[-1]["response"] == polled(short, id)
    with short.http() as http:
        read = [http.get(f"{PATH}/{id}?stream=true")]
        read += [http.get(f"{PATH}/{id}?stream=true&starting_after={n}") for n in range(len(whole))]
        assert http.get(f"{PATH}/{id}?stream=true&starting_after=9999").text == ""
    assert [parse_named_events(response.text) for response in read] == [whole[n:] for n in range(len(whole) + 1)]


def test_a_stream_goes_on_where_another_connection_has_left_it(slow):
    client = slow.client()
    first = []
    with client.responses.create(
        model="test-model", input="hello", background=True, stream=True, max_output_tokens=40,
        extra_body={"ignore_eos": True},
    ) as stream:  # fmt: skip
        for event in stream:
            first.append(event)
            if len(first) == 10:
                break
    id = first[0].response.id
    rest = list(client.responses.retrieve(id, stream=True, starting_after=first[-1].sequence_number))
    assert [event.sequence_number for event in first + rest] == list(range(len(first + rest)))
    deltas = "".join(event.delta for event in first + rest if event.type == "response.output_text.delta")
    assert deltas == TEXT * 4
    assert rest[-1].type == "response.incomplete"
    wait_until(lambda: load(slow) == 0)


def test_readers_of_a_stream_learn_that_it_was_cancelled(slow):
    with slow.http() as http, http.stream("POST", PATH, json=ENDLESS | {"stream": True}) as stream:
        text = ""
        pieces = stream.iter_text()
        while "output_text.delta" not in text:
            text += next(pieces)
        id = parse_named_events(text[: text.rindex("\n\n") + 2])[0]["response"]["id"]
        slow.post(f"{PATH}/{id}/cancel", {})
        text += "".join(pieces)
    last = parse_named_events(text)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    wait_until(lambda: load(slow) == 0)


def test_only_a_stream_in_the_background_has_events(short):
    whole = ended(short, started(short)["id"])
    streamed = short.post(PATH, {"input": "hello", "stream": True}).text
    for id in (whole["id"], parse_named_events(streamed)[0]["response"]["id"]):
        with short.http() as http:
            error = http.get(f"{PATH}/{id}?stream=true").json()["error"]
        assert error["param"] == "stream"


def test_a_response_that_the_engine_refuses_has_failed(tmp_path):
    config = EchoConfig(reply=tuple(b"ab"), step_s=0.02, max_model_len=20000, max_live=1)
    with running_server(tmp_path, ECHO, config) as server:
        first = started(server, **ENDLESS)
        wait_until(lambda: polled(server, first["id"])["status"] == "in_progress")
        second = ended(server, started(server)["id"])
        assert (second["status"], second["error"]["code"]) == ("failed", "rate_limit_exceeded")
        events = parse_named_events(server.post(PATH, BODY | {"stream": True}).text)
        assert [event["type"] for event in events] == [f"response.{kind}" for kind in ("created", "queued", "failed")]


def test_a_response_counts_for_its_key(tmp_path):
    with running_server(tmp_path, ECHO, SLOW, api_keys=("one", "two"), max_concurrent_per_key=1) as server:
        one, two = (server.http(headers={"Authorization": f"Bearer {key}"}) for key in ("one", "two"))
        with one, two:
            id = one.post(PATH, json=ENDLESS).json()["id"]
            assert one.post(PATH, json=BODY).status_code == 429
            assert one.post(CHAT, json=HELLO).status_code == 429
            assert two.post(CHAT, json=HELLO).status_code == 200
            assert two.get(f"{PATH}/{id}?stream=true").status_code == 404
            assert one.post(f"{PATH}/{id}/cancel").status_code == 200
            wait_until(lambda: one.post(CHAT, json=HELLO).status_code == 200)


@pytest.mark.parametrize(("grace_period_s", "num_tokens", "last"), [(0.0, 5000, "failed"), (30.0, 60, "incomplete")])
def test_a_shutdown_waits_for_responses_within_the_grace_period(tmp_path, grace_period_s, num_tokens, last):
    """Connections that read events are not waited for. The response itself is."""
    with running_server(tmp_path, ECHO, SLOW, grace_period_s=grace_period_s) as server, server.http() as http:
        with http.stream("POST", PATH, json=ENDLESS | {"max_output_tokens": num_tokens, "stream": True}) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
        id = parse_named_events(text[: text.index("\n\n") + 2])[0]["response"]["id"]
        with http.stream("GET", f"{PATH}/{id}?stream=true") as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            server.process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert parse_named_events(text)[-1]["type"] == f"response.{last}"
        assert server.process.wait(20) == 0


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.lists(st.integers(0, 60), max_size=12))
def test_a_log_splits_any_blocks_into_the_events(sizes, cuts):
    events = [b"e" * size + b"\n\n" for size in sizes]
    text = b"".join(events)
    allowed = sorted({at for at in cuts if at < len(text) and text[at : at + 1] == b"e"} | {0, len(text)})
    log = EventLog()
    found = [event for start, end in itertools.pairwise(allowed) for event in log.take(text[start:end])]
    assert found == list(enumerate(events))
