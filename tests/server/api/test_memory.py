"""What is left of a request when its answer is complete."""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from server.engine import wire
from server.engine.protocol import Receiver
from tests.server.support.requests import CHAT, HELLO
from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, state_of

PROMPT = {"prompt": "abc", "n": 2}
SCORED = wire.Output("", [97], "length", logprobs=[wire.Logprobs.packed(-1.0, [97], [-1.0])])
EMBEDDED = wire.Output("", [], "stop", embedding=struct.pack("2f", 0.6, 0.8))


class PromptClient(StubClient):
    """Its outputs have the ids of their requests."""

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Receiver]]) -> None:
        for request, receiver in requests:
            self.submitted.append(request)
            receiver.on_output(msgspec.structs.replace(self._outputs[0], request_id=request.request_id))


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "output"),
    [
        (CHAT, HELLO, DONE),
        (COMPLETIONS, PROMPT, DONE),
        (COMPLETIONS, PROMPT | {"logprobs": 1}, SCORED),
        (COMPLETIONS, PROMPT, wire.Output("", [], "error", error="no")),
        ("/v1/responses", {"input": "a"}, DONE),
        ("/v1/messages", HELLO | {"max_tokens": 3}, DONE),
        ("/v1/embeddings", {"input": "a"}, EMBEDDED),
    ],
    ids=["chat", "completion", "logprobs", "error", "responses", "messages", "embeddings"],
)
def test_an_answer_is_not_left_to_the_garbage_collector(path, body, output, stream):
    """Its log-probabilities take megabytes, which the collector does not count."""
    client = PromptClient(output)
    state = state_of(client)
    if path == "/v1/embeddings":
        client.info = wire.EngineInfo(max_model_len=64, vocab_size=256, embedding_size=2)
    else:
        body = body | {"stream": stream}
    response = call(state, "POST", path, json=body)
    assert response.status_code == (500 if output.error else 200), response.text
    assert client.submitted
    assert not list(state.generations.values())
