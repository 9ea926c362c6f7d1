"""Whether a response is hidden from other API keys, on all routes about it."""

from __future__ import annotations

import re

import httpx

from tests.server.support.requests import wait_until

RESPONSES = "/v1/responses"


def check_owner(own: httpx.Client, other: httpx.Client) -> None:
    """AssertionError if the other client's key can do anything with a response of the first one's."""
    made = own.post(RESPONSES, json={"input": "hello", "max_output_tokens": 4}).json()
    path = f"{RESPONSES}/{made['id']}"
    unknown = other.get(f"{RESPONSES}/resp-none")
    assert unknown.status_code == 404
    for answer in (
        other.get(path),
        other.get(f"{path}/input_items"),
        other.post(f"{path}/cancel"),
        other.delete(path),
    ):
        assert answer.status_code == 404
        assert answer.text == unknown.text.replace("resp-none", made["id"])  # as if it did not exist
    following = {"input": "more", "max_output_tokens": 4, "previous_response_id": made["id"]}
    nothing = other.post(RESPONSES, json=following | {"previous_response_id": "resp-none"})
    for route in (RESPONSES, f"{RESPONSES}/input_tokens"):
        refused = other.post(route, json=following)
        assert refused.status_code == nothing.status_code == 400
        assert refused.text == nothing.text.replace("resp-none", made["id"])
    assert own.get(path).json() == made
    assert own.post(RESPONSES, json=following).status_code == 200
    assert own.delete(path).json()["deleted"] is True
    _check_running(own, other)


def _check_running(own: httpx.Client, other: httpx.Client) -> None:
    body = {"input": "hello", "stream": True, "ignore_eos": True, "max_output_tokens": 3000}
    with own.stream("POST", RESPONSES, json=body) as answer:
        pieces = answer.iter_text()
        text = next(pieces)
        while (found := re.search(r'"(resp-\w+)"', text)) is None:
            text += next(pieces)
        assert other.post(f"{RESPONSES}/{found[1]}/cancel").status_code == 404
        assert own.get(f"{RESPONSES}/{found[1]}").json()["status"] == "in_progress"
        assert own.post(f"{RESPONSES}/{found[1]}/cancel").json()["status"] == "cancelled"
    wait_until(lambda: own.get("/load").json()["server_load"] == 0)
