"""Bodies of the allowed size that would keep the event loop busy for minutes: refused before the work is done."""

from __future__ import annotations

import msgspec
import pytest

from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, state_of

CHAT = "/v1/chat/completions"


def refusal(path: str, body: dict) -> dict:
    """The error, from a server that neither tokenizes nor renders."""
    state = state_of(StubClient(DONE))
    state.model.tokenizer.encode_plain = state.model.chat_template.render = _work
    response = call(state, "POST", path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def _work(*args: object, **options: object) -> None:
    raise AssertionError("this is the work that was to be spared")


@pytest.mark.parametrize("prompt", [["a"] * 200, [[1]] * 200])
def test_more_prompts_than_sequences_are_allowed(prompt):
    error = refusal(COMPLETIONS, {"prompt": prompt})
    assert error["param"] == "prompt"
    assert "at most 128" in error["message"]


def test_ids_are_looked_at_once_their_number_is_known_to_fit():
    for prompt in ([-1] * 1000, [[-1] * 1000]):
        assert refusal(COMPLETIONS, {"prompt": prompt})["code"] == "context_length_exceeded"
    body = {"prompt": [1], "stop_token_ids": [-1] * 257}
    assert "stop_token_ids: at most 256 entries are allowed" in refusal(COMPLETIONS, body)["message"]
    body = {"prompt": [1], "logit_bias": {f"no id {i}": 1 for i in range(301)}}
    assert "at most 300 tokens are allowed, got 301" in refusal(COMPLETIONS, body)["message"]


def test_a_conversation_of_more_messages_than_the_context_has_tokens():
    error = refusal(CHAT, {"messages": [{"role": "user", "content": ""}] * 64})
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_template_variables_of_any_size():
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ["b"] * 20_000}}
    error = refusal(CHAT, body)
    assert error["param"] == "chat_template_kwargs"
    assert "65536 bytes" in error["message"]


@pytest.mark.parametrize("value", [[1], "a", 5, True])
def test_template_variables_are_an_object(value):
    error = refusal(CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": value})
    assert (error["type"], error["param"]) == ("BadRequestError", "chat_template_kwargs")


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("prompt", {"prompt": [[1]] * 70_000}),
        ("logit_bias", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(70_000)}}),
        ("guided_json", {"prompt": "a", "guided_json": [{}] * 70_000}),
        (None, {"prompt": "a"} | {str(i): 1 for i in range(70_000)}),
    ],
)
def test_a_body_of_very_many_entries_is_not_decoded(param, body):
    error = refusal(COMPLETIONS, body)
    assert error["param"] == param
    assert "more than 65536 brackets and colons outside of texts" in error["message"]


def test_brackets_of_a_text_are_no_matter():
    state = state_of(StubClient(DONE))
    for text in ("[{:,", '\\",\\'):
        body = {"prompt": text * 50_000, "max_tokens": 1}
        assert call(state, "POST", COMPLETIONS, json=body).json()["error"]["code"] == "context_length_exceeded"
    state.engine.info = msgspec.structs.replace(state.engine.info, max_model_len=100_000)
    assert state.body_limits.max_marks == 200_000
