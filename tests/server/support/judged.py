"""Judges every answer that a test's clients read by OpenAI's published schemas, or by the types of its client.

The transports of `httpx` and `httpx2` are wrapped. Plain clients, the official one and those that are built on it
(LangChain, LiteLLM) read through them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import httpx2
import pydantic
import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.responses import Response, ResponseStreamEvent

from tests.server.support.openai_schemas import COMPLETION_CHUNK, validate

SCHEMAS = {
    "chat.completion": "CreateChatCompletionResponse",
    "chat.completion.chunk": "CreateChatCompletionStreamResponse",
    "text_completion": "CreateCompletionResponse",
    "model": "Model",
}  # by the field `object`
# Of the routes that the published file leaves out. The types are not strict: a date's seconds are a float in them.
RESPONSE = pydantic.TypeAdapter(Response)
RESPONSE_EVENT = pydantic.TypeAdapter(ResponseStreamEvent)
EMBEDDINGS = pydantic.TypeAdapter(CreateEmbeddingResponse)

# Of one answer. What comes after is of the same kind, and half a megabyte takes a quarter of a second to judge.
MAX_JUDGED_BYTES = 1 << 19

Faults = list[str]
AnyRequest = httpx.Request | httpx2.Request
AnyResponse = httpx.Response | httpx2.Response


def judge(value: Any, *, streamed: bool = False) -> None:
    """Raises a ValidationError for an object of OpenAI's that has another form than theirs."""
    if not isinstance(value, dict):
        return
    kind = value.get("object", "")
    if kind in SCHEMAS:
        value = _without_abort(value)
    if kind == "text_completion":
        value = without_unknown_first(value)
        validate(COMPLETION_CHUNK if streamed else SCHEMAS[kind], value)
    elif kind in SCHEMAS:
        validate(SCHEMAS[kind], value)
    elif kind == "response" and "deleted" not in value:
        RESPONSE.validate_python(value)
    elif kind == "list":
        _judge_list(value)
    elif str(value.get("type", "")).startswith("response."):
        RESPONSE_EVENT.validate_python(value)
    elif "error" in value and "type" not in value and not kind:  # Anthropic's errors have a type
        validate("ErrorResponse", value)


def _judge_list(value: dict[str, Any]) -> None:
    kinds = {item.get("object") for item in value["data"]}
    if kinds == {"model"}:
        validate("ListModelsResponse", value)
    elif kinds == {"embedding"} and not any(isinstance(item["embedding"], str) for item in value["data"]):
        EMBEDDINGS.validate_python(value)  # which knows numbers only, and no base64


def _without_abort(answer: dict[str, Any]) -> dict[str, Any]:
    """What a pause of the engine has ended has vLLM's finish reason, which OpenAI's schema does not know."""
    choices = [c | {"finish_reason": "length"} if c.get("finish_reason") == "abort" else c
               for c in answer.get("choices", ())]  # fmt: skip
    return answer | {"choices": choices} if choices else answer


def without_unknown_first(completion: dict[str, Any]) -> dict[str, Any]:
    """The first token of an echoed prompt has no log-probability. It is null, as in OpenAI's own answers, and their
    schema does not allow it."""
    copied: dict[str, Any] = copy.deepcopy(completion)
    for choice in copied.get("choices", ()):
        logprobs = choice.get("logprobs") or {}
        for key in ("token_logprobs", "top_logprobs"):
            if (logprobs.get(key) or [0])[0] is None:
                del logprobs[key][0]
    return copied


class Reader:
    """Judges one answer while a client reads it: the events of a stream as they come, anything else at its end."""

    def __init__(self, answer: str, content_type: str, faults: Faults) -> None:
        self._answer = answer
        self._streamed = content_type.startswith("text/event-stream")
        self._is_json = content_type.startswith("application/json")
        self._faults = faults
        self._unread = b""
        self._left = MAX_JUDGED_BYTES

    def read(self, part: bytes) -> None:
        if not self._streamed and not self._is_json:
            return
        self._unread += part
        if self._streamed:
            *lines, self._unread = self._unread.split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    self._judge(line.removeprefix(b"data: "))

    def end(self) -> None:
        if self._is_json and self._unread:
            self._judge(self._unread)

    def _judge(self, body: bytes) -> None:
        self._left -= len(body)
        if self._left < 0:
            return
        try:
            judge(json.loads(body), streamed=self._streamed)
        except ValueError as error:  # ValidationError is one, too
            self._faults.append(f"{self._answer}: {body[:2000]!r}\n{error}")


LAST_EVENT = b"data: [DONE]\n\n"


class Judged(httpx.SyncByteStream, httpx2.SyncByteStream):
    """A response's bytes, judged as they are read."""

    def __init__(self, stream: Any, reader: Reader) -> None:
        self._stream = stream
        self._reader = reader

    def __iter__(self) -> Iterator[bytes]:
        """Reads to the end once the last event is there. Clients stop at it, and leave an iterator that the garbage
        collector then closes at any time: httpcore's pool waits for ever if this happens within its own lock."""
        parts, tail = iter(self._stream), b""
        for part in parts:
            tail = (tail + part)[-len(LAST_EVENT) :]
            if tail == LAST_EVENT:
                part += b"".join(parts)
            self._reader.read(part)
            yield part
        self._reader.end()

    def close(self) -> None:
        self._stream.close()


class AsyncJudged(httpx.AsyncByteStream, httpx2.AsyncByteStream):
    """The same of an asynchronous client."""

    def __init__(self, stream: Any, reader: Reader) -> None:
        self._stream = stream
        self._reader = reader

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._reader.read(part)
            yield part
        self._reader.end()

    async def aclose(self) -> None:
        await self._stream.aclose()


@contextlib.contextmanager
def every_answer_judged() -> Iterator[Faults]:
    """Judges what any client of this process reads until the context ends. Yields what it finds."""
    faults: Faults = []

    def reader(request: AnyRequest, response: AnyResponse) -> Reader:
        answer = f"{request.method} {request.url}: {response.status_code}"
        return Reader(answer, response.headers.get("content-type", ""), faults)

    def judged(handle: Callable[..., AnyResponse]) -> Callable[..., AnyResponse]:
        @functools.wraps(handle)
        def handled(transport: object, request: AnyRequest) -> AnyResponse:
            response = handle(transport, request)
            response.stream = Judged(response.stream, reader(request, response))
            return response

        return handled

    def async_judged(handle: Callable[..., Awaitable[AnyResponse]]) -> Callable[..., Awaitable[AnyResponse]]:
        @functools.wraps(handle)
        async def handled(transport: object, request: AnyRequest) -> AnyResponse:
            response = await handle(transport, request)
            response.stream = AsyncJudged(response.stream, reader(request, response))
            return response

        return handled

    with pytest.MonkeyPatch.context() as patch:
        for package in (httpx, httpx2):
            patch.setattr(package.HTTPTransport, "handle_request", judged(package.HTTPTransport.handle_request))
            for transport in (package.AsyncHTTPTransport, package.ASGITransport):
                patch.setattr(transport, "handle_async_request", async_judged(transport.handle_async_request))
        yield faults


@pytest.fixture(scope="package", autouse=True)
def faults_of_answers() -> Iterator[Faults]:
    """For the conftest.py of a package: judges what clients read in all of its tests."""
    with every_answer_judged() as faults:
        yield faults


@pytest.fixture(autouse=True)
def answers_are_valid(faults_of_answers: Faults) -> Iterator[None]:
    """For the same conftest.py: a test fails if an answer that was read in it had another form than OpenAI's."""
    yield
    found = faults_of_answers.copy()
    faults_of_answers.clear()
    assert not found, "\n\n".join(found[:5])
