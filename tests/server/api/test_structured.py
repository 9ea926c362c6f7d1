"""The fields that ask for structured output: what each means, and what is refused by its name."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from server.api.request.grammars import MAX_BYTES, asked_constraint, compiled
from server.api.request.schemas import ChatRequest, CompletionRequest
from server.grammar import forms
from server.grammar.checker import GrammarChecker
from server.grammar.structural_tags import structural_tag_grammar
from server.http.request_error import RequestError
from tests.server.support.requests import CHAT
from tests.server.support.stub_app import DONE, StubClient, call, state_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
NEW_TAG = {
    "format": {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<f>", "content": CONTENT, "end": ">"}]}
}


class State:
    """Of the server's state what is asked for here."""

    def __init__(self) -> None:
        self.grammars = GrammarChecker()


def grammar_of(body: dict[str, object], kind: type = ChatRequest) -> str | None:
    required = {"messages": []} if kind is ChatRequest else {}
    constraint = asked_constraint(msgspec.json.decode(json.dumps(required | body), type=kind))
    made = asyncio.run(compiled(State(), constraint))
    return None if made is None else made.text


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, forms.json_schema_grammar({"type": "object"})),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, forms.json_schema_grammar(SCHEMA)),
        ({"response_format": FORMAT}, forms.json_schema_grammar(SCHEMA)),
        ({"response_format": {"type": "structural_tag", **TAG}}, structural_tag_grammar(TAG).text),
        ({"response_format": {"type": "structural_tag", **NEW_TAG}}, structural_tag_grammar(NEW_TAG).text),
        ({"guided_json": SCHEMA}, forms.json_schema_grammar(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, forms.json_schema_grammar(SCHEMA)),
        ({"guided_regex": "a+"}, forms.regex_grammar("a+")),
        ({"guided_choice": ["a", "b"]}, forms.choice_grammar(["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, forms.lark_grammar('start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, forms.json_schema_grammar(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, forms.json_schema_grammar({"type": "object"})),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, forms.regex_grammar("a+")),
        ({"structured_outputs": {"choice": ["a"]}}, forms.choice_grammar(["a"])),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, forms.lark_grammar('root ::= "a"')),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, structural_tag_grammar(TAG).text),
        ({"structured_outputs": {"structural_tag": NEW_TAG}}, structural_tag_grammar(NEW_TAG).text),
    ],
)
def test_what_each_field_means(body, grammar) -> None:
    assert grammar_of(body) == grammar
    assert grammar_of(body, CompletionRequest) == grammar


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": 3}, "response_format", "an object with a `type`"),
        ({"response_format": {"type": "xml"}}, "response_format", "`xml` is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "with a `schema`"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "a `schema`"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "needs a `format`"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_tokens"}}},
            "response_format",
            "format: the format `any_tokens` is not supported",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"type": "x"}}}}},
            "response_format",
            r"Invalid type: x \(at #/items\)",
        ),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_json": 5}, "guided_json", "must be a schema"),
        ({"guided_regex": ["a"]}, "guided_regex", "must be a text"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_choice": "a"}, "guided_choice", "a list of texts"),
        ({"guided_choice": [1]}, "guided_choice", "a list of texts"),
        ({"guided_choice": []}, "guided_choice", "at least one choice"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"structured_outputs": []}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, .* got 0"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one of .* got 2"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "`disable_any_whitespace` is"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "there is guided_json already"),
        (
            {"response_format": FORMAT, "structured_outputs": {"json": {}}},
            "structured_outputs",
            "response_format already",
        ),
        ({"guided_regex": "a" * MAX_BYTES}, "guided_regex", "is larger than"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "characters; at most"),
    ],
)
def test_what_is_refused_by_name(body, param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        grammar_of(body)
    assert (caught.value.status, caught.value.param) == (400, param)


PLAIN = "{{ messages[0].content }}{% for tool in tools or () %}{{ tool.function.name }}{% endfor %}"
REASONING = PLAIN + "{# reasoning ends with </think> #}"
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}


def test_a_grammar_of_several_parts_is_compiled_once() -> None:
    state = state_of(StubClient(DONE), REASONING)
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": FORMAT, "tools": [FUNCTION]}
    assert call(state, "POST", CHAT, json=body | {"thinking_token_budget": 5}).status_code == 200
    assert call(state, "POST", CHAT, json=body | {"thinking_token_budget": 6}).status_code == 200
    assert len(state.grammars.verdicts) == 1


def test_minus_one_is_no_limit_of_reasoning() -> None:
    state = state_of(StubClient(DONE), REASONING)
    body = {"messages": [{"role": "user", "content": "a"}], "tools": []}
    assert call(state, "POST", CHAT, json=body | {"thinking_token_budget": -1}).status_code == 200
    assert not state.grammars.verdicts  # a limit takes a grammar


BROKEN = {"items": {"type": "x"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": BROKEN}, "guided_json", "Invalid type: x (at #/items)"),
        ({"guided_json": BROKEN, "tools": [FUNCTION]}, "guided_json", "Invalid type: x (at #/items)"),
        ({"tools": [{"type": "function", "function": {"name": "g", "parameters": {"properties": {"a": BROKEN}}}}],
          "guided_json": SCHEMA}, "tools", "Invalid type: x"),
        ({"guided_json": {"$ref": "#/x"}, "tools": [FUNCTION]}, "guided_json", "does not exist"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", [PLAIN, REASONING], ids=["plain", "reasoning"])
def test_the_field_with_the_fault_is_named_whatever_is_around_it(template, fields, param, words) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    error = call(state_of(StubClient(DONE), template), "POST", CHAT, json=body).json()["error"]
    assert error["param"] == param
    assert words in error["message"]
