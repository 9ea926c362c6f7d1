"""Requests that ask for much work of the HTTP process: whatever they cost, /health is answered meanwhile."""

from __future__ import annotations

import json

import pytest

from tests.server.support.canary import canary
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import wait_until
from tests.server.support.running import ECHO, RunningServer, running_server, server_of
from tests.server.support.tokenizers import LLAMA3_TEMPLATE, TOOL_TEMPLATE

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
LONG_PROMPT = 131_000
COUNTING_TEMPLATE = LLAMA3_TEMPLATE + (
    "{% if count %}{% for a in range(count) %}{% for b in range(count) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if text %}{% for a in range(8) %}{% if text | wordwrap(1) == '' %}{% endif %}{% endfor %}{% endif %}"
)


# An echo with a context of 140,000 tokens and a template that can be made to count.
roomy = server_of(EchoConfig(max_model_len=140_000), template=COUNTING_TEMPLATE, template_timeout_s=3.0)


# An engine that calls a tool with 12,000 numbers, in a few steps.
CALL = '{"name": "f", "parameters": {"a": [' + "1," * 12_000 + "1]}}"
with_tools = server_of(
    EchoConfig(max_model_len=300_000, reply=tuple(CALL.encode()), tokens_per_step=1000), template=TOOL_TEMPLATE
)


def post(server: RunningServer, path: str, body: dict, status: int = 200) -> dict:
    with server.http() as http, canary(server):
        response = http.post(path, json=body)
    assert response.status_code == status, response.text[:1000]
    return response.json()


def test_stop_strings_that_almost_match_everywhere(echo):
    """Of each, another beginning fits each end of the text: a search that tries them all takes milliseconds a token."""
    stops = ["a" * (16 * i + 16) + "b" * (1007 - 16 * i) + "X" for i in range(31)]
    body = {"prompt": "a", "add_special_tokens": False, "stop": stops, "n": 8, "max_tokens": 1200}
    choices = post(echo, COMPLETIONS, body)["choices"]
    assert [choice["text"] for choice in choices] == ["a" * 1200] * 8


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_many_log_probabilities(echo, stream):
    body = HELLO | {"n": 32, "max_tokens": 300, "logprobs": True, "top_logprobs": 20, "stream": stream}
    with echo.http() as http, canary(echo):
        answer = http.post(CHAT, json=body)
    assert answer.status_code == 200
    assert answer.text.count('"top_logprobs"') == 32 * 300


def test_prompts_scores_for_many_choices(echo):
    body = {"prompt": [65] * 2000, "prompt_logprobs": 20, "n": 2, "max_tokens": 1}
    choices = post(echo, COMPLETIONS, body)["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2000] * 2
    assert choices[1]["prompt_logprobs"] == choices[0]["prompt_logprobs"]


def test_an_echo_with_scores_for_many_choices(echo):
    body = {"prompt": [65] * 2000, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 0}
    choices = post(echo, COMPLETIONS, body)["choices"]
    assert [len(choice["logprobs"]["top_logprobs"]) for choice in choices] == [2000] * 16


def test_many_prompts_each_of_which_is_short(roomy):
    body = {"prompt": ["word " * 3998] * 128, "max_tokens": 1}
    assert len(post(roomy, COMPLETIONS, body)["choices"]) == 128


def test_an_echo_of_many_token_ids(roomy):
    body = {"prompt": [[65] * LONG_PROMPT] * 6, "echo": True, "max_tokens": 1}
    assert {len(choice["text"]) for choice in post(roomy, COMPLETIONS, body)["choices"]} == {LONG_PROMPT + 1}


def test_a_template_that_counts_to_ten_thousand_millions_is_stopped(roomy):
    error = post(roomy, CHAT, HELLO | {"chat_template_kwargs": {"count": 100_000}}, status=400)["error"]
    assert error["param"] == "chat_template_kwargs"
    assert "longer than 3 s" in error["message"]


def test_a_filter_that_takes_long(roomy):
    post(roomy, CHAT, HELLO | {"chat_template_kwargs": {"text": "a" * 30_000}, "max_tokens": 1})


def test_texts_of_many_tokens_and_back(roomy):
    tokens = post(roomy, "/tokenize", {"prompt": "abcd" * 250_000, "return_token_strs": True})
    assert tokens["token_strs"][1:] == [*"abcd"] * 250_000
    assert post(roomy, "/detokenize", {"tokens": [65] * 1_000_000}) == {"prompt": "A" * 1_000_000}


@pytest.mark.parametrize(
    ("param", "entry"),
    [
        ("allowed_token_ids", "65"),
        ("bad_words", '""'),
        ("stop", '""'),
        ("prompt", '""'),
        ("prompt", "[]"),
        ("logit_bias", '""'),
        ("user", "{}"),
        ("guided_json", "1"),
    ],
)
def test_a_list_that_fills_the_body(roomy, param, entry):
    text = ",".join([entry] * (7_900_000 // (len(entry) + 1)))
    body = f'{{"max_tokens": 1, "{param}": [{text}], "prompt": "a"}}'
    if param == "prompt":
        body = f'{{"max_tokens": 1, "prompt": [{text}]}}'
    with roomy.http() as http, canary(roomy):
        response = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text[:1000]


def test_as_many_messages_as_there_may_be(roomy):
    body = {"messages": [{"role": "user", "content": ""}] * 55_000}
    post(roomy, CHAT, body, status=400)  # they do not fit, which is known when all are rendered


def tool(name: str = "f", **properties) -> dict:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_many_tools_of_many_words(with_tools):
    properties = {f"p{i}": {"enum": ["a", "b", "c"], "description": "word " * 10} for i in range(15)}
    tools = [tool(f"f{i}", **properties) for i in range(120)]
    error = post(with_tools, CHAT, HELLO | {"tools": tools}, status=400)["error"]
    assert error["code"] == "context_length_exceeded"


def test_calls_with_many_arguments_in_the_history(with_tools):
    call = {"function": {"name": "f", "arguments": '{"a": [' + "1," * 60_000 + "1]}"}}
    messages = [*HELLO["messages"], {"role": "assistant", "tool_calls": [call]}]
    post(with_tools, CHAT, {"messages": messages, "max_tokens": 1})


def test_an_answer_that_is_a_long_call(with_tools):
    choice = post(with_tools, CHAT, HELLO | {"tools": [tool()]})["choices"][0]
    assert len(choice["message"]["tool_calls"][0]["function"]["arguments"]) > 24_000


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_many_turns_in_other_forms(with_tools, path):
    turns = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(20_000)]
    body = {"input": turns, "max_output_tokens": 1} if path == "/v1/responses" else {"messages": turns, "max_tokens": 1}
    assert post(with_tools, path, body)["usage"]["input_tokens"] > 200_000


def test_conversations_of_one_request(roomy):
    conversations = [[{"role": "user", "content": "word " * 3998}]] * 128
    assert len(post(roomy, f"{CHAT}/batch", {"messages": conversations, "max_tokens": 1})["choices"]) == 128


def test_token_ids_in_and_out(roomy):
    params = {"max_tokens": 2, "prompt_logprobs": 1, "n": 4}
    body = {"token_ids": [65] * LONG_PROMPT, "sampling_params": params, "return_token_ids": True}
    answer = post(roomy, "/inference/v1/generate", body)
    assert [len(answer[field]) for field in ("prompt_token_ids", "prompt_logprobs")] == [LONG_PROMPT] * 2


@pytest.mark.parametrize(
    ("body", "num_lines", "status"),
    [
        ({"prompt": "a", "max_tokens": 1}, 30_000, "failed"),  # the last line is none
        ({"prompt": "a" * 6_000_000}, 12, "completed"),  # too long for the model
        ({"prompt": "a", "x": [[]] * 30_000}, 30, "completed"),
        ({"prompt": "a", "max_tokens": 300, "ignore_eos": True, "logprobs": 20, "n": 32}, 2, "completed"),
    ],
)
def test_files_and_batches(tmp_path_factory, body, num_lines, status):
    text = json.dumps(body)
    head = f'"method": "POST", "url": "{COMPLETIONS}", "body": {text}'
    lines = [f'{{"custom_id": "{i}", {head}}}' for i in range(num_lines)]
    content = "\n".join([*lines, "no line"] if status == "failed" else lines).encode()
    folder = tmp_path_factory.mktemp("batches")
    with running_server(folder, ECHO, EchoConfig(), batch_folder=folder / "kept") as server, canary(server):
        client = server.client()
        file = client.files.create(file=("a.jsonl", content), purpose="batch")
        assert client.files.content(file.id).content == content
        batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).status == status)
        assert client.batches.retrieve(batch.id).request_counts.total == (0 if status == "failed" else num_lines)
