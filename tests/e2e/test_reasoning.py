"""Reasoning apart from the answer, over all APIs: a puppet thinks, calls a tool and answers."""

from __future__ import annotations

import json
import os

import pytest

from tests.e2e.conftest import serve
from tests.puppet import write_puppet
from tests.server.support.sse_events import parse_named_events, stream_events

pytestmark = pytest.mark.e2e

THOUGHTS = ["First ", "I look ", "at it", ".\n"]
THOUGHT = "".join(THOUGHTS).rstrip()
CALL = json.dumps({"name": "look", "parameters": {"at": "it"}})
ANSWER = "It is four."
USER = [{"role": "user", "content": "2 + 2?"}]
SEEN = [*USER, {"role": "tool", "tool_call_id": "a", "content": "seen"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
NUM_THOUGHTS = len(THOUGHTS)


def thinker(folder, answers, *, ending="", shows=""):
    """A puppet whose chat template has the comment `shows`."""
    model = write_puppet(folder / "model", answers, ending=ending)
    template = json.loads((model / "tokenizer_config.json").read_text())
    template["chat_template"] += f"{{# {shows} #}}"
    (model / "tokenizer_config.json").write_text(json.dumps(template))
    return model


def served(model):
    flags = ("--model", str(model), "--served-model-name", "puppet", "--max-num-seqs", "4")
    return serve(*flags, "--compile-cache", os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    answers = [[*THOUGHTS, "</think>", "\n\n ", CALL], [" Then ", "</think>\n", ANSWER]]
    return thinker(tmp_path_factory.mktemp("puppet"), answers, ending="<think>\n", shows="</think>")


@pytest.fixture(scope="module")
def server(model):
    with served(model) as running:
        yield running


def post(server, path, **body):
    with server.http() as http:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer


def chat(server, messages=USER, **body):
    return post(server, "/v1/chat/completions", messages=messages, **body).json()


def test_a_chat_has_its_reasoning_apart(server):
    answer = chat(server, SEEN)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == (ANSWER, "Then", "Then")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1
    assert "reasoning_content" not in chat(server, SEEN, include_reasoning=False)["choices"][0]["message"]
    several = chat(server, SEEN, n=2, logprobs=True)["choices"]
    assert [choice["message"]["reasoning"] for choice in several] == ["Then"] * 2
    assert "".join(token["token"] for token in several[1]["logprobs"]["content"]).startswith(" Then </think>\n")


def test_a_stream_of_a_chat(server):
    with server.http() as http:
        chunks = stream_events(http, "/v1/chat/completions", {"messages": USER, "tools": TOOLS})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == THOUGHT
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "look"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"at": "it"}


def test_a_response_has_an_item_of_reasoning(server):
    tool = {"type": "function", **TOOLS[0]["function"]}
    whole = post(server, "/v1/responses", input="2 + 2?", tools=[tool]).json()
    thought, call = whole["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": THOUGHT}])
    assert (call["type"], call["name"]) == ("function_call", "look")
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": NUM_THOUGHTS}
    events = parse_named_events(post(server, "/v1/responses", input="2 + 2?", tools=[tool], stream=True).text)
    own = [event for event in events if event.get("output_index") == 0]
    assert "".join(event["delta"] for event in own if event["type"] == "response.reasoning_text.delta") == THOUGHT
    assert own[-1]["item"]["content"] == thought["content"]
    seen = {"type": "function_call_output", "call_id": call["call_id"], "output": "seen"}
    again = post(server, "/v1/responses", previous_response_id=whole["id"], input=[seen], tools=[tool]).json()
    assert again["output"][1]["content"][0]["text"] == ANSWER


def test_a_message_has_a_block_of_thinking(server):
    tool = {"name": "look", "input_schema": {"type": "object"}}
    body = {"messages": USER, "max_tokens": 100, "tools": [tool]}
    thought, call = post(server, "/v1/messages", **body).json()["content"]
    assert (thought["type"], thought["thinking"], call["type"]) == ("thinking", THOUGHT, "tool_use")
    (call,) = post(server, "/v1/messages", **body, thinking={"type": "disabled"}).json()["content"]
    assert call["input"] == {"at": "it"}
    events = parse_named_events(post(server, "/v1/messages", **body, stream=True).text)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT
    assert [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"] == [
        "thinking", "tool_use",
    ]  # fmt: skip


def test_a_grammar_begins_after_the_reasoning(server):
    """Without it the puppet would say its answer, which is no number."""
    answer = chat(server, SEEN, structured_outputs={"regex": "[0-9]{3}"}, max_tokens=20)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == "Then"
    assert message["content"].isdecimal()
    assert len(message["content"]) == 3
    forced = chat(server, USER, tools=TOOLS, tool_choice="required")
    (call,) = forced["choices"][0]["message"]["tool_calls"]
    assert (forced["choices"][0]["message"]["reasoning"], call["function"]["name"]) == (THOUGHT, "look")


@pytest.mark.parametrize("budget", range(NUM_THOUGHTS + 2))
def test_a_budget_closes_the_reasoning(server, budget):
    answer = chat(server, USER, tools=TOOLS, thinking_token_budget=budget)
    message = answer["choices"][0]["message"]
    assert (message["reasoning"] or "") == "".join(THOUGHTS[:budget]).rstrip()
    assert message["tool_calls"][0]["function"]["name"] == "look"
    details = answer["usage"].get("completion_tokens_details", {"reasoning_tokens": 0})
    assert details["reasoning_tokens"] == min(budget, NUM_THOUGHTS)


STOPS = ["Then", "\n", " four"]  # in the reasoning, before the answer, and in the answer
STOPPED = "It is"


def test_stop_strings_act_on_the_answer(server):
    choice = chat(server, SEEN, stop=STOPS)["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Then", STOPPED)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " four")
    included = chat(server, SEEN, stop=STOPS, include_stop_str_in_output=True)["choices"][0]["message"]
    assert included["content"] == STOPPED + " four"
    hidden = chat(server, SEEN, stop=STOPS, include_reasoning=False)["choices"][0]["message"]
    assert hidden["content"] == STOPPED
    several = post(server, "/v1/chat/completions/batch", messages=[SEEN, SEEN], stop=STOPS).json()["choices"]
    assert [choice["message"]["content"] for choice in several] == [STOPPED] * 2
    with server.http() as http:
        chunks = stream_events(http, "/v1/chat/completions", {"messages": SEEN, "stop": STOPS})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == STOPPED
