"""The judge of what clients read finds wrong answers, whichever client reads them and however far."""

from __future__ import annotations

import json

import httpx
import httpx2
import openai
import pytest

from tests.server.support.judged import Reader
from tests.server.support.openai_schemas import SCHEMAS

pytestmark = pytest.mark.skipif(not SCHEMAS.is_file(), reason="OpenAI's schemas are not in ../shared/data")

CHOICE = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
CHUNK = {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [CHOICE], "usage": None}


def faults_of(content_type: str, *parts: bytes) -> list[str]:
    faults: list[str] = []
    reader = Reader("POST /", content_type, faults)
    for part in parts:
        reader.read(part)
    reader.end()
    return faults


def test_events_are_judged_as_they_come_wherever_they_are_cut():
    good, bad = (f"data: {json.dumps(chunk)}\n\n".encode() for chunk in (CHUNK, {**CHUNK, "model": 7}))
    assert faults_of("text/event-stream", good, b"data: [DONE]\n\n") == []
    (fault,) = faults_of("text/event-stream", good + bad[:9], bad[9:])  # no [DONE]: the client broke off
    assert '7 is not of type "string"' in fault


def test_a_whole_answer_is_judged_at_its_end():
    assert faults_of("application/json", b'{"object": "text_comp', b'letion"}')
    assert faults_of("application/json", json.dumps({"error": "a text"}).encode())
    assert faults_of("text/plain", b"anything") == []


def test_the_official_client_reads_through_the_judge():
    for package in (httpx, httpx2):
        for transport in (package.HTTPTransport, package.AsyncHTTPTransport):
            handle = getattr(transport, "handle_request", None) or transport.handle_async_request
            assert hasattr(handle, "__wrapped__")
    assert isinstance(openai.DefaultHttpxClient(), httpx2.Client)
