"""Which weights have made which tokens of a choice."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine import wire
from server.engine.generation import Choice, Generation
from server.text.stream import TextStream
from server.text.tokenizer import ByteLevelTokenizer
from tests.server.support.requests import CHAT, HELLO
from tests.server.support.stub_app import COMPLETIONS, StubClient, call, state_of
from tests.server.support.tokenizers import byte_tokenizer

TOKENIZER = ByteLevelTokenizer(byte_tokenizer(), config={}, chat_template=None)


@given(st.lists(st.one_of(st.sampled_from("ab"), st.integers(1, 3)), max_size=12))
def test_runs_are_those_of_the_versions_of_the_single_tokens(news: list[str | int]) -> None:
    generation = Generation(StubClient(), "r", stream=True)
    choice = Choice(generation, 0, TextStream(TOKENIZER), 1, include_stop=False)
    version, versions = "default", []
    for item in news:
        if isinstance(item, str):
            version = item
            choice.on_weight_version(item)
        else:
            versions += [version] * item
            choice.on_tokens([97] * item)
    runs = [(version, len(list(run))) for version, run in groupby(versions)]
    if not runs or runs[-1][0] != version:
        runs.append((version, 0))  # of the tokens that would come next
    assert choice.weight_versions == runs


PAUSED = wire.Output("", [], "abort", by_pause=True)


@pytest.mark.parametrize("output", [PAUSED, wire.Output("", [97, 98], "abort", by_pause=True)])
def test_what_a_pause_has_aborted_is_an_answer(output: wire.Output) -> None:
    text = "ab" if output.token_ids else ""
    state = state_of(StubClient(output))
    completion = call(state, "POST", COMPLETIONS, json={"prompt": "x"}).json()
    assert completion["choices"][0]["text"] == text and completion["choices"][0]["finish_reason"] == "abort"
    chat = call(state, "POST", CHAT, json=HELLO).json()["choices"][0]
    assert (chat["message"]["content"] or "") == text and chat["finish_reason"] == "abort"
    response = call(state, "POST", "/v1/responses", json={"input": "x"}).json()
    assert response["status"] == "incomplete"
    message = call(state, "POST", "/v1/messages", json=HELLO | {"max_tokens": 5}).json()
    assert message["stop_reason"] == "max_tokens"


def test_an_embedding_that_a_pause_has_aborted_is_an_error() -> None:
    client = StubClient(PAUSED)
    client.info = wire.EngineInfo(max_model_len=64, vocab_size=client.info.vocab_size, embedding_size=2)
    answer = call(state_of(client), "POST", "/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 503 and "paused" in answer.json()["error"]["message"]
