"""What is refused, with which status, and which field is named. Every refusal leaves the server as it was."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest

from tests.server.support.openai_schemas import SCHEMAS, validate

# just too long; ten thousand tokens; enough to be encoded in a thread; too long to be encoded at all
LENGTHS = [(4096, "input_tokens"), (10_000, "input_tokens"), (50_000, "input_tokens"), (10**6, "input_text")]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.skipif(not SCHEMAS.is_file(), reason="OpenAI's schemas are not in ../shared/data: nothing is validated")
def test_the_schemas_are_at_hand():
    with pytest.raises(jsonschema_rs.ValidationError):
        validate("ErrorResponse", {"error": "a text where an object must be"})


def refusal(server, path=CHAT, *, status=400, **fields):
    base = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    with server.http() as http:
        response = http.post(path, json=base | fields)
        assert response.status_code == status, response.text
        assert http.post(path, json=base | {"max_tokens": 1}).status_code == 200
    return response.json()["error"]


OUT_OF_RANGE = {
    "temperature": (-0.1, 1001, "nan"),
    "top_p": (0, 1.1),
    "min_p": (-0.1, 1.1),
    "presence_penalty": (2.1,),
    "frequency_penalty": (-2.1,),
    "repetition_penalty": (0, 1e-300, 1e300),
    "top_k": (-2,),
    "n": (0, 129),
    "max_tokens": (0,),
    "max_completion_tokens": (0,),
    "min_tokens": (-1, 5000),
    "stop": ("", ["a", ""], ["a"] * 33, "a" * 1025),
    "stop_token_ids": ([-1], [262]),
    "logit_bias": ({"a": 1}, {"1.5": 1}, {"-1": 1}, {"262": 1}, {"9" * 5000: 1}, {"1": 101}),
    "prompt_logprobs": (21,),
    "stream_options": ({}, {"include_usage": None}),
    "thinking_token_budget": (-2,),
    "cache_salt": ("",),
    "messages": ([],),
    "chat_template_kwargs": ({"messages": []},),
    "tool_choice": ("auto",),  # there are no tools
}
TOGETHER = [
    {"min_tokens": 5, "max_tokens": 4},
    {"top_logprobs": 2},
    *({"top_logprobs": value, "logprobs": True, "stream": stream} for value in (21, -1) for stream in (False, True)),
    {"prompt_logprobs": 1, "stream": True},
    {"continue_final_message": True, "add_generation_prompt": True},
]
WRONG = [{name: value} for name, values in OUT_OF_RANGE.items() for value in values] + TOGETHER


@pytest.mark.parametrize("fields", WRONG, ids=lambda fields: str(fields)[:60])
def test_values_out_of_range_name_their_field(echo, fields):
    error = refusal(echo, **fields)
    assert error["param"] == next(iter(fields))
    assert error["param"] in error["message"]


@pytest.mark.parametrize(("seed", "relation"), [(2**63, "less_than_equal"), (-(2**63) - 1, "greater_than_equal")])
def test_a_seed_is_of_64_bits(echo, seed, relation):
    error = refusal(echo, seed=seed)
    assert error["param"] == "seed"
    assert relation in error["message"]


@pytest.mark.parametrize("fields", [{"max_tokens": 0, "echo": True}, {"max_tokens": None}], ids=str)
def test_a_prompt_that_fills_the_context_is_not_said_to_have_asked_for_output(echo, fields):
    error = refusal(echo, COMPLETIONS, prompt=[65] * 4096, **fields)
    assert "output tokens" not in error["message"]
    assert "your prompt contains 4096 tokens, and at least one token, hidden or not, follows it" in error["message"]


@pytest.mark.parametrize("fields", [{"logprobs": 21}, {"logprobs": -1}, {"prompt": []}, {"max_tokens": 0}], ids=str)
def test_completions_values_name_their_field(echo, fields):
    assert refusal(echo, COMPLETIONS, **fields)["param"] == next(iter(fields))


@pytest.mark.parametrize("prompt", [None, [], [[]], "", ["a", 1], [[1], "a"], [-1], [262], [[1, 300]], [True], {}])
def test_prompts_that_are_none(echo, prompt):
    error = refusal(echo, COMPLETIONS, prompt=prompt, add_special_tokens=False)
    assert error["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages.0.role"),
        ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages.1.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": 5, "content": ""}]}, "messages.0.role"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": True}, "n"),
        ({"stop": [1]}, "stop.0"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 2}}, "stream_options.include_usage"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids.1"),
    ],
)
def test_wrong_types_name_their_field(echo, fields, param):
    error = refusal(echo, **fields)
    assert error["type"] == "BadRequestError"
    assert error["param"] == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "", "content": "a"}, "messages.0.role"),
        ({"role": "w" * 65, "content": "a"}, "messages.0.role"),
        ({"role": "wizard"}, "messages.0.content"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
    ],
)
def test_messages_that_no_template_knows(echo, message, param):
    assert refusal(echo, messages=[message])["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_served_is_refused_and_not_ignored(echo, fields, param):
    error = refusal(echo, **fields)
    assert error["param"] == param
    assert "not supported yet" in error["message"]


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"modalities": ["text"]}]
)
def test_what_asks_for_nothing_special_is_served(echo, fields):
    assert echo.post(CHAT, {"messages": HELLO, "max_tokens": 1, **fields}).status_code == 200


def test_an_unknown_model(echo):
    error = refusal(echo, model="gpt-0", status=404)
    assert error == {
        "message": "The model `gpt-0` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": "model_not_found",
    }


def test_an_unknown_model_of_a_strange_name(echo):
    assert len(refusal(echo, model="a" * 1_000_000, status=404)["message"]) < 300
    assert refusal(echo, model="a\nb\0", status=404)["message"] == r"The model `a b\x00` does not exist."


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (COMPLETIONS, "prompt")])
@pytest.mark.parametrize(("length", "param"), LENGTHS)
def test_a_prompt_that_is_too_long(echo, path, field, length, param):
    text = "a" * length
    value = [{"role": "user", "content": text}] if path == CHAT else text
    error = refusal(echo, path, **{field: value})
    assert error["param"] == param
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "BadRequestError"
    assert "maximum context length is 4096 tokens" in error["message"]


def test_a_prompt_that_fits_with_too_much_asked(echo):
    error = refusal(echo, COMPLETIONS, prompt=[65] * 4000, max_tokens=97)
    assert error["param"] == "input_tokens"
    for number in ("4096", "4000", "97", "4097"):
        assert number in error["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_than_the_context_asked(echo, field):
    error = refusal(echo, **{field: 4097})
    assert error["param"] == field
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"hello"',
        b"5",
        b"null",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "a"}]} trailing',
        b'{"messages": ' + b"[" * 100_000,
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "messages": []}',
    ],
    ids=range(13),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bodies_that_are_no_requests(echo, path, body):
    with echo.http() as http:
        response = http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data"])
def test_other_content_types(echo, content_type):
    with echo.http() as http:
        response = http.post(CHAT, content=b"messages=hello", headers={"content-type": content_type})
        assert response.status_code == 415
        assert "application/json" in response.json()["error"]["message"]


def test_a_charset_is_no_other_content_type(echo):
    body = json.dumps({"messages": HELLO, "max_tokens": 1})
    with echo.http() as http:
        response = http.post(CHAT, content=body, headers={"content-type": "application/json; charset=utf-8"})
        assert response.status_code == 200


def test_a_body_that_is_too_large(echo):
    with echo.http() as http:
        response = http.post(CHAT, content=b"x" * (2**23 + 1), headers={"content-type": "application/json"})
        assert response.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", "/nowhere", 404), ("GET", CHAT, 405), ("DELETE", "/health", 405)),
        *(("POST", "/v1/responses/compact", 404), ("GET", "/v1/responses/compact", 404)),
    ],
)
def test_routes_that_are_not(echo, method, path, status):
    with echo.http() as http:
        response = http.request(method, path)
        assert response.status_code == status


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        (CHAT, "POST"),
        ("/ping", "GET, HEAD, POST"),
        ("/v1/responses/a", "DELETE, GET, HEAD"),
        ("/v1/responses/input_tokens", "POST"),
    ],
)
def test_a_wrong_method_is_told_all_right_ones(echo, path, methods):
    with echo.http() as http:
        response = http.put(path)
    assert (response.status_code, response.headers["allow"]) == (405, methods)


@pytest.mark.parametrize("depth", [500, 900, 980, 1100])
def test_values_nested_as_deep_as_one_likes(echo, depth):
    nested = "[" * depth + "]" * depth
    with echo.http() as http:
        body = f'{{"messages": {json.dumps(HELLO)}, "max_tokens": 1, "chat_template_kwargs": {{"a": {nested}}}}}'
        response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400)
