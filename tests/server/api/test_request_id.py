"""`request_id`: the client chooses the part of the answer's id that is otherwise random."""

from __future__ import annotations

import threading

import pytest

from tests.server.support.requests import CHAT, HELLO, LONG, SLOW, wait_until
from tests.server.support.running import ECHO, running_server
from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, state_of


def test_answers_have_the_id_and_the_engine_an_id_of_its_own():
    client = StubClient(DONE)
    state = state_of(client)
    for path, body, prefix in ((CHAT, HELLO, "chatcmpl"), (COMPLETIONS, {"prompt": "a"}, "cmpl")):
        for _ in range(2):  # it may come again
            answer = call(state, "POST", path, json=body | {"request_id": "my own", "max_tokens": 1})
            assert answer.json()["id"] == f"{prefix}-my own"
    ids = [request.request_id for request in client.submitted]
    assert len(set(ids)) == 4
    assert all("-my own-" in id for id in ids)


@pytest.mark.parametrize("id", ["", "a\n", "x" * 201])
def test_ids_that_cannot_be_are_refused(id):
    answer = call(state_of(StubClient(DONE)), "POST", CHAT, json=HELLO | {"request_id": id})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "request_id"


def test_two_requests_with_one_id_do_not_run_at_once(tmp_path):
    with running_server(tmp_path, ECHO, SLOW) as server, server.http() as http:
        begun = threading.Event()

        def read() -> None:
            with server.http() as other, other.stream("POST", CHAT, json=LONG | {"request_id": "one"}) as response:
                for line in response.iter_lines():
                    if line:
                        begun.set()
                        break

        thread = threading.Thread(target=read)
        with server.http() as first, first.stream("POST", CHAT, json=LONG | {"request_id": "two"}) as response:
            lines = response.iter_lines()  # kept: the connection ends with it
            next(lines)
            refused = http.post(CHAT, json=HELLO | {"request_id": "two", "max_tokens": 1})
            assert refused.status_code == 400
            assert "is running already" in refused.json()["error"]["message"]
            thread.start()  # another id
            assert begun.wait(30)
        thread.join()
        wait_until(lambda: http.post(CHAT, json=HELLO | {"request_id": "two", "max_tokens": 1}).status_code == 200)
