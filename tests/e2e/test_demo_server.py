"""The demo behind a real server, as its first user meets it."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is 47 + 35?"}]


def test_a_chat_is_streamed_to_the_official_client(server):
    with server.client() as client:
        stream = client.chat.completions.create(
            model="demo", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    *content, last, usage = chunks
    assert content[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in [*content, last])
    assert "82" in text
    assert last.choices[0].finish_reason == "stop"
    assert usage.usage.completion_tokens == whole.usage.completion_tokens > 0
    assert whole.choices[0].message.content == text
    assert "<|" not in text


def test_what_start_up_did_is_said_with_its_seconds(server):
    said = "\n".join(server.lines)
    for phase in ("load", "allocate", "compiled", "ready after"):
        assert re.search(rf"{phase}.*\d+\.\d s", said), said
    assert "float32" in said
    assert re.search("attention backend (cpu|reference)", said)


def test_the_line_to_try_works_when_typed(server):
    start = next(line for line in server.lines if "curl http" in line)
    command = f"{start}\n{server.process.stdout.readline()}"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert "82" in json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_offline_answers_are_the_servers(server, built, monkeypatch, settings):
    from scripts import llm

    monkeypatch.setattr(llm, "build", lambda settings, report, tokenizer, **_: (built.engine(), built, None))
    prompts = [f"What is {a} + {b}?" for a, b in ((12, 30), (7, 8), (51, 44))]
    with llm.LLM("demo") as offline:
        results = offline.chat([[{"role": "user", "content": prompt}] for prompt in prompts], {"temperature": 0})
    with server.client() as client:
        online = [
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": prompt}], temperature=0)
            for prompt in prompts
        ]
    assert [result.outputs[0].text for result in results] == [answer.choices[0].message.content for answer in online]
    assert [len(result.prompt_token_ids) for result in results] == [answer.usage.prompt_tokens for answer in online]


def test_an_offline_chat_has_its_tool_calls(built, monkeypatch):
    from scripts import llm

    monkeypatch.setattr(llm, "build", lambda settings, report, tokenizer, **_: (built.engine(), built, None))
    expression = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    calculator = {"name": "calculator", "description": "Evaluates an expression.", "parameters": expression}
    messages = [{"role": "user", "content": "What is 347 * 21?"}]
    with llm.LLM("demo") as offline:
        tools = [{"type": "function", "function": calculator}]
        (result,) = offline.chat(messages, llm.SamplingParams(temperature=0, max_tokens=60), tools=tools)
        (call,) = result.outputs[0].tool_calls
        messages += [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "7287"},
        ]
        (answer,) = offline.chat(messages, {"temperature": 0, "tools": tools})
    assert result.outputs[0].text == "" and result.outputs[0].finish_reason == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == {"expression": "347 * 21"}
    assert (answer.outputs[0].text, answer.outputs[0].tool_calls) == ("347 * 21 = 7287.", [])
