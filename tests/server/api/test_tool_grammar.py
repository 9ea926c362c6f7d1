"""What the grammars of tool calls let through, byte by byte."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate
from msgspec.structs import replace

from batcher.grammar import GrammarError
from server.api.request.grammars import tool_grammar
from server.api.request.schemas import FunctionSpec
from server.api.request.tools import ToolChoice, Tools
from server.grammar.compiler import Vocabulary, compile_grammar
from server.grammar.forms import json_schema_grammar, lark_grammar, regex_grammar
from server.text.tool_calls.json_calls import HermesCallParser, JsonCallParser, XlamCallParser
from server.text.tool_calls.pieces import CallDelta
from server.text.tool_calls.pythonic_calls import PythonicCallParser
from tests.examples import examples
from tests.server.grammar.test_matcher import walk
from tests.server.support.schemas import schemas

BYTES = Vocabulary.of_bytes()
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = FunctionSpec("get_weather", parameters=CITY, strict=True)
TIME = FunctionSpec("get_time")
ANY = FunctionSpec("any", parameters={"properties": {"a": {"type": "integer"}}})


def tools(*specs: FunctionSpec, choice: ToolChoice, parallel: bool = True) -> Tools:
    return Tools(specs=specs, choice=choice, parallel=parallel)


def grammar_of(asked: Tools, *others: object) -> str:
    return tool_grammar(asked, *others).text


def accepts(grammar: str, text: str) -> bool:
    matcher = compile_grammar(grammar, BYTES)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def call(name: str, arguments: object) -> str:
    return json.dumps({"name": name, "parameters": arguments})


PARIS = call("get_weather", {"city": "Paris {}"})
NOW = call("get_time", {})
GOOD = {
    "required": [PARIS, NOW, f"{PARIS}; {NOW}; {PARIS}"],
    "named": [PARIS],
    "auto": [
        *("", "plain {text}", f"Hm. {PARIS}", f"{PARIS}; {NOW}", call("get_time", {"free": 1}), '{"name": "Al"}'),
        '{"name":"get_weather","parameters":{"city":"Paris"}}',
        '{"type": "function", "name": "get_weather", "arguments": {"city": "Paris"}}',
        '{"id":"call_deok","name":"get_weather","arguments":{"city":"Paris"}}',
    ],
}
BAD = {
    "required": [
        "",
        "text",
        f"text {PARIS}",
        call("other", {}),
        call("get_weather", {}),
        call("get_time", {"a": 1}),
        "{",
    ],
    "named": [f"{PARIS}; {PARIS}", NOW, call("get_weather", {"city": 1})],
    "auto": [
        *(call("get_weather", {"city": 1}), call("get_weather", {}), f"Hm. {PARIS[:-2]}"),
        '{ "type" : "function", "name" : "get_weather", "arguments": {}}',
        '{"id":"call_deok","name":"get_weather","arguments":{}}',
        '{"type": "function", "id": 0, "name": "get_weather", "arguments": {"city": 1}}',
    ],
}
GRAMMARS = {
    "required": tools(WEATHER, TIME, choice=ToolChoice.REQUIRED),
    "named": tools(WEATHER, choice=ToolChoice.NAMED, parallel=False),
    "auto": tools(WEATHER, TIME, choice=ToolChoice.AUTO),
}


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("name", ["get_weather", "github/issues:read.v-1"])
def test_calls_that_are_let_through(kind, name):
    specs = [replace(spec, name=spec.name.replace("get_weather", name)) for spec in GRAMMARS[kind].specs]
    grammar = grammar_of(dataclasses.replace(GRAMMARS[kind], specs=tuple(specs)))
    good, bad = ([text.replace("get_weather", name) for text in texts[kind]] for texts in (GOOD, BAD))
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_a_schema_without_a_type_is_an_objects():
    grammar = grammar_of(tools(ANY, choice=ToolChoice.REQUIRED, parallel=False))
    assert accepts(grammar, call("any", {"a": 1, "b": None}))
    assert not accepts(grammar, call("any", {"a": "1"}))
    assert not accepts(grammar, call("any", 5))


def tagged(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_calls_between_tags_that_are_let_through():
    paris, now = tagged("get_weather", {"city": "Paris </tool_call>"}), tagged("get_time", {})
    required = grammar_of(GRAMMARS["required"], None, HermesCallParser)
    assert all(accepts(required, text) for text in (paris, now, f"{paris}\n{now}\n{paris}"))
    bad = ["", PARIS, f"text {paris}", paris[:-1], f"{paris}{now}", tagged("get_weather", {}), tagged("other", {})]
    assert [text for text in bad if accepts(required, text)] == []
    named = grammar_of(GRAMMARS["named"], None, HermesCallParser)
    assert accepts(named, paris)
    assert not accepts(named, f"{paris}\n{paris}")
    auto = grammar_of(GRAMMARS["auto"], None, HermesCallParser)
    assert all(accepts(auto, text) for text in ("plain", f"Hm.\n{paris}\n{now}", tagged("get_time", {"free": 1})))
    assert not accepts(auto, f"Hm.\n{tagged('get_weather', {'city': 1})}")
    either = grammar_of(GRAMMARS["auto"], json_schema_grammar({"type": "array"}), HermesCallParser)
    assert all(accepts(either, text) for text in ("[1]", paris, f"{now}\n{paris}"))
    assert not any(accepts(either, text) for text in ("{}", PARIS, f"[1]{paris}"))


def listed(*calls: str) -> str:
    return f"[{', '.join(calls)}]".replace("parameters", "arguments")


def test_calls_in_a_list_that_are_let_through():
    required = grammar_of(GRAMMARS["required"], None, XlamCallParser)
    assert all(accepts(required, text) for text in (listed(PARIS), listed(NOW, PARIS, NOW)))
    bad = ["", "[]", PARIS, f"[{PARIS}]", f"text {listed(PARIS)}", listed(PARIS)[:-1], listed(call("get_weather", {}))]
    assert [text for text in bad if accepts(required, text)] == []
    named = grammar_of(GRAMMARS["named"], None, XlamCallParser)
    assert accepts(named, listed(PARIS))
    assert not accepts(named, listed(PARIS, PARIS))
    auto = grammar_of(GRAMMARS["auto"], None, XlamCallParser)
    assert all(accepts(auto, text) for text in ("plain", "[]", f"Hm. {listed(NOW, PARIS)}", "[1]"))
    bad = [listed(call("get_weather", {"city": 1})), listed(NOW, call("get_weather", {})), listed(NOW, PARIS)[:-2]]
    assert [text for text in bad if accepts(auto, text)] == []
    either = grammar_of(GRAMMARS["auto"], json_schema_grammar({"type": "array", "maxItems": 0}), XlamCallParser)
    assert all(accepts(either, text) for text in ("[]", listed(PARIS)))
    assert not any(accepts(either, text) for text in ("[1]", listed(call("get_weather", {}))))


ANSWERS = {
    "a list": (json_schema_grammar({"type": "array"}), "[\n  1, {}\n]", "{}"),
    "an object": (json_schema_grammar({"type": "object", "required": ["x"]}), '{\n  "x": [1,  2]\n}', '{"y": 1}'),
    "a pattern": (regex_grammar(r"\d+"), "12", "a"),
    "a grammar": (lark_grammar('start: "yes" | no\nno: "no"'), "no", "maybe"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_of_its_grammar_or_calls(name):
    answer, good, bad = ANSWERS[name]
    grammar = grammar_of(tools(WEATHER, TIME, choice=ToolChoice.AUTO), answer)
    assert [text for text in (good, PARIS, f"{NOW}; {PARIS}") if not accepts(grammar, text)] == []
    assert [text for text in (bad, f"{good} {PARIS}", call("get_weather", {}), "") if accepts(grammar, text)] == []


@pytest.mark.parametrize("choice", [ToolChoice.AUTO, ToolChoice.REQUIRED])
def test_no_text_in_a_schema_is_read_as_a_grammar(choice):
    described = {"type": "object", "properties": {"a": {"type": "integer", "description": 'root ::= "a"\nstart: "b"'}}}
    grammar = grammar_of(tools(FunctionSpec("f", parameters=described, strict=True), choice=choice))
    assert accepts(grammar, call("f", {"a": 1}))
    assert not accepts(grammar, call("f", {"a": "b"}))


def test_a_schema_may_refer_to_itself():
    node = {"type": "object", "properties": {"next": {"$ref": "#"}, "n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    node |= {"additionalProperties": False, "$defs": {"n": {"type": "integer"}}}
    grammar = grammar_of(tools(FunctionSpec("f", parameters=node), choice=ToolChoice.REQUIRED))
    assert accepts(grammar, call("f", {"next": {"n": 1}, "n": 2}))
    assert not accepts(grammar, call("f", {"next": {}, "n": 2}))


def test_a_schema_that_cannot_be_held_to_is_refused():
    strict = FunctionSpec("f", parameters={"type": "object", "properties": {"a": {"type": "strin"}}})
    with pytest.raises(GrammarError, match="strin"):
        grammar_of(tools(strict, choice=ToolChoice.REQUIRED))


@settings(max_examples=examples(25))
@given(
    schemas, st.integers(0, 2**32), st.booleans(), st.sampled_from([JsonCallParser, HermesCallParser, XlamCallParser])
)
def test_whatever_is_drawn_is_read_as_calls_that_are_valid(schema, seed, parallel, form):
    parameters = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    specs = (FunctionSpec("f", parameters=parameters), TIME)
    asked = Tools(specs=specs, choice=ToolChoice.REQUIRED, parallel=parallel)
    text, is_whole = walk(grammar_of(asked, None, form), np.random.default_rng(seed))
    parser = form(asked.names)
    parser.push(text)
    parser.finish()
    pieces = parser.take()
    if is_whole:
        assert all(isinstance(piece, CallDelta) for piece in pieces)
        assert pieces
        assert parallel or len(pieces) == 1
        for piece in pieces:
            validate(json.loads(piece.arguments), parameters if piece.name == "f" else {"maxProperties": 0})


def test_what_looks_like_a_reference_in_data_stays_as_it_is():
    pointer, id = {"$ref": "#/components/schemas/Pet"}, {"$id": "https://example.com/pet", "$ref": "other.json#/Pet"}
    edit = {"old": {"const": pointer}, "new": {"enum": [id, pointer]}, "$ref": {"type": "integer"}}
    annotated = {"type": "string", "default": pointer, "examples": [id]}
    schema = {"type": "object", "properties": {**edit, "note": annotated}, "required": ["old", "new"]}
    grammar = grammar_of(tools(FunctionSpec("edit", parameters=schema), choice=ToolChoice.REQUIRED))
    assert accepts(grammar, call("edit", {"old": pointer, "new": id, "$ref": 1, "note": "a"}))
    assert accepts(grammar, call("edit", {"old": pointer, "new": pointer}))
    assert not accepts(grammar, call("edit", {"old": {"$ref": "#/properties/parameters/components"}, "new": id}))


NUMBER = {"n": {"$anchor": "number", "type": "integer"}}
REFERRING = {
    "an $id and a local reference": {"$id": "https://example.com/f", "properties": {"a": {"$ref": "#/$defs/n"}}},
    "a relative $id": {"$id": "f.json", "properties": {"a": {"$ref": "#/$defs/n"}}},
    "an absolute reference": {"$id": "urn:x:f", "properties": {"a": {"$ref": "urn:x:f#/$defs/n"}}},
    "an $anchor": {"properties": {"a": {"$ref": "#number"}}},
    "an $id and an $anchor": {"$id": "https://example.com/f", "properties": {"a": {"$ref": "#number"}}},
    "a reference to a property": {"properties": {"b": {"type": "integer"}, "a": {"$ref": "#/properties/b"}}},
}


@pytest.mark.parametrize("name", REFERRING)
@pytest.mark.parametrize("choice", [ToolChoice.AUTO, ToolChoice.REQUIRED])
def test_each_tools_references_are_its_own(name, choice):
    schema = {"type": "object", **REFERRING[name], "required": ["a"], "$defs": NUMBER}
    other = {"type": "object", **REFERRING[name], "required": ["a"], "$defs": {"n": NUMBER["n"] | {"type": "boolean"}}}
    if "b" in schema["properties"]:
        other["properties"] = {**schema["properties"], "b": {"type": "boolean"}}
    specs = [FunctionSpec(name, parameters=s, strict=True) for name, s in (("f", schema), ("g", other))]
    grammar = grammar_of(tools(*specs, WEATHER, choice=choice))
    for good in (call("f", {"a": 1}), call("g", {"a": True}), PARIS):
        assert accepts(grammar, good)
    for bad in (call("f", {"a": True}), call("g", {"a": 1}), call("f", {})):
        assert not accepts(grammar, bad)


BIG = 1234567890123456789


def test_numbers_beyond_doubles_in_a_tool_are_named():
    ids = {"type": "object", "properties": {"id": {"enum": [BIG, BIG + 1]}, "n": {"type": "integer", "minimum": 0}}}
    made = tool_grammar(tools(FunctionSpec("f", parameters=ids), TIME, choice=ToolChoice.REQUIRED))
    assert made.unenforced == ("f: enum",)
    assert accepts(made.text, call("f", {"id": BIG, "n": 3}))
    assert not accepts(made.text, call("f", {"id": BIG, "n": -3}))
    with pytest.raises(GrammarError, match="f: a grammar cannot hold the keyword enum; leave it out"):
        tool_grammar(tools(FunctionSpec("f", parameters=ids, strict=True), choice=ToolChoice.AUTO))


def test_bounds_that_cannot_be_held_are_named_with_the_tool():
    bounds = {"minimum": -(2**63), "maximum": 2**63 - 1}
    schema = {"type": "object", "properties": {"a": {"type": "integer", **bounds}, "b": {"type": "integer"}}}
    asked = tools(FunctionSpec("f", parameters=schema), TIME, choice=ToolChoice.REQUIRED)
    made = tool_grammar(asked)
    assert made.unenforced == ("f: minimum", "f: maximum")
    assert accepts(made.text, call("f", {"a": 2**63 - 1, "b": 1}))
    with pytest.raises(GrammarError, match="f: a grammar cannot hold the keyword minimum; leave it out"):
        tool_grammar(tools(FunctionSpec("f", parameters=schema, strict=True), choice=ToolChoice.AUTO))


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ({"items": {"type": "strin"}}, r"Invalid type: strin \(at #/properties/a/items\)"),
        ({"$ref": "#/$defs/none"}, r"Pointer '/\$defs/none' does not exist \(at #/properties/a\)"),
        ({"type": "integer", "minimum": "5"}, r"Expected f64 for 'minimum', got \"5\" \(at #/properties/a\)"),
    ],
)
def test_an_error_names_the_tool_and_the_place(inner, words):
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    asked = tools(WEATHER, FunctionSpec("f", parameters=schema), choice=ToolChoice.REQUIRED)
    with pytest.raises(GrammarError, match=f"^f: {words}$"):
        tool_grammar(asked)


def test_calls_in_pythons_form_next_to_an_answer_are_json():
    asked = tools(TIME, WEATHER, choice=ToolChoice.AUTO)
    answer = json_schema_grammar({"type": "array"})
    assert accepts(grammar_of(asked, answer, PythonicCallParser), PARIS)
