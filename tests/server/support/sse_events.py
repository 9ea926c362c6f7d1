"""Reads a stream of server-sent events and checks its frame."""

from __future__ import annotations

import json
from typing import Any

import httpx


def stream_events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer, [DONE] left out after it was seen to be the last."""
    response = http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse_events(response.text)


def parse_named_events(text: str) -> list[dict[str, Any]]:
    """Of a stream that names each event by its type and ends without [DONE]."""
    *frames, last = text.split("\n\n")
    assert last == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def parse_events(text: str) -> list[dict[str, Any]]:
    *frames, last = text.split("\n\n")
    assert last == ""
    assert all(frame.startswith("data: ") for frame in frames)
    payloads = [frame.removeprefix("data: ") for frame in frames]
    assert payloads.pop() == "[DONE]"
    return [json.loads(payload) for payload in payloads]
