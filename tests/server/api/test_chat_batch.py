"""/v1/chat/completions/batch: several conversations in one request."""

from __future__ import annotations

import msgspec
import pytest

from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT
from tests.server.support.running import ECHO, running_server, server_of
from tests.server.support.stub_app import DONE, StubClient, call, post_all, state_of

BATCH = f"{CHAT}/batch"
CONVERSATIONS = [
    [{"role": "user", "content": "one"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two two"}],
    [{"role": "user", "content": "three"}, {"role": "assistant", "content": "3"}, {"role": "user", "content": "more"}],
]


thinking = server_of(EchoConfig(reply=tuple(b"why</think>so")), reasoning_parser="deepseek_r1")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 40},
        {"max_tokens": 40, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"max_completion_tokens": 30, "stop": "brief", "n": 1, "stream": False, "tools": []},
    ],
)
def test_each_conversation_has_the_choice_that_it_has_alone(echo, fields):
    """The engine says the prompt."""
    answer = echo.post(BATCH, {"messages": CONVERSATIONS} | fields).json()
    alone = [echo.post(CHAT, {"messages": messages} | fields).json() for messages in CONVERSATIONS]
    assert answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, single in zip(answer["choices"], alone, strict=True):
        expected = single["choices"][0] | {key: single[key] for key in ("prompt_token_ids",) if key in single}
        assert choice == expected | {"index": choice["index"]}
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][count] == sum(single["usage"][count] for single in alone)


def test_reasoning_is_told_from_each_answer(thinking):
    answer = thinking.post(BATCH, {"messages": CONVERSATIONS}).json()
    messages = [choice["message"] for choice in answer["choices"]]
    assert [(message["reasoning_content"], message["content"]) for message in messages] == [("why", "so")] * 3


def test_a_message_without_reasoning_says_so(tmp_path, echo):
    config = EchoConfig(reply=tuple(b"so"))
    with running_server(tmp_path, ECHO, config, reasoning_parser="qwen3") as server:
        asked = {"messages": CONVERSATIONS[0]}
        answers = [server.post(CHAT, asked | fields).json() for fields in ({}, {"include_reasoning": False})]
    message, hidden = (answer["choices"][0]["message"] for answer in answers)
    assert message["content"] == "so"
    assert (message["reasoning"], message["reasoning_content"]) == (None, None)
    assert "reasoning" not in hidden
    assert "reasoning" not in echo.post(CHAT, {"messages": CONVERSATIONS[0]}).json()["choices"][0]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": CONVERSATIONS[0]}, "messages.0"),
        ({"messages": [CONVERSATIONS[0], []]}, "messages"),
        ({"messages": [CONVERSATIONS[0]] * 129}, "messages"),
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"temperature": -1}, "temperature"),
        ({"logprobs": True, "top_logprobs": 20, "max_tokens": 40}, "logprobs"),
    ],
)
def test_what_is_refused(fields, param):
    most = 3 * 40 * 21 - 1  # the third conversation has a third of the log-probabilities
    client = StubClient(DONE)
    client.info = msgspec.structs.replace(client.info, max_model_len=4096)
    state = state_of(client, max_request_logprobs=most)
    answer = call(state, "POST", BATCH, json={"messages": CONVERSATIONS} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_unknown_fields_of_messages_are_ignored_or_refused_as_elsewhere():
    body = {"messages": [[message | {"colour": "red"} for message in messages] for messages in CONVERSATIONS[:1]]}
    body |= {"max_tokens": 1}
    (answer,) = post_all(state_of(StubClient(DONE)), BATCH, [body])
    assert answer.status_code == 200
    (refused,) = post_all(state_of(StubClient(DONE), strict_fields=True), BATCH, [body])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.0.colour")


def test_a_grammar_is_sent_once_and_all_belong_to_one_request():
    client = StubClient(DONE)
    client.info = msgspec.structs.replace(client.info, max_model_len=4096)
    body = {"messages": CONVERSATIONS, "max_tokens": 1, "structured_outputs": {"choice": ["a", "b"]}, "seed": 3}
    (answer,) = post_all(state_of(client), BATCH, [body])
    assert answer.status_code == 200
    first, *others = client.submitted
    assert first.sampling.grammar
    assert {request.sampling.grammar for request in others} == {""}  # the same as that before
    assert {request.group for request in client.submitted} == {first.group}
    assert {request.sampling.seed for request in client.submitted} == {3}
    assert len({request.prompt for request in client.submitted}) == 3
