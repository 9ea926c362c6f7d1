"""What the grammars of tool calls let through, byte by byte."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate

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
JSON_FORMS = [JsonCallParser, HermesCallParser, XlamCallParser]
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
def test_calls_that_are_let_through(kind):
    grammar = tool_grammar(GRAMMARS[kind])
    assert [text for text in GOOD[kind] if not accepts(grammar, text)] == []
    assert [text for text in BAD[kind] if accepts(grammar, text)] == []


def test_a_schema_without_a_type_is_an_objects():
    grammar = tool_grammar(tools(ANY, choice=ToolChoice.REQUIRED, parallel=False))
    assert accepts(grammar, call("any", {"a": 1, "b": None}))
    assert not accepts(grammar, call("any", {"a": "1"}))
    assert not accepts(grammar, call("any", 5))


def tagged(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_calls_between_tags_that_are_let_through():
    paris, now = tagged("get_weather", {"city": "Paris </tool_call>"}), tagged("get_time", {})
    required = tool_grammar(GRAMMARS["required"], None, HermesCallParser)
    assert all(accepts(required, text) for text in (paris, now, f"{paris}\n{now}\n{paris}"))
    bad = ["", PARIS, f"text {paris}", paris[:-1], f"{paris}{now}", tagged("get_weather", {}), tagged("other", {})]
    assert [text for text in bad if accepts(required, text)] == []
    named = tool_grammar(GRAMMARS["named"], None, HermesCallParser)
    assert accepts(named, paris)
    assert not accepts(named, f"{paris}\n{paris}")
    auto = tool_grammar(GRAMMARS["auto"], None, HermesCallParser)
    assert all(accepts(auto, text) for text in ("plain", f"Hm.\n{paris}\n{now}", tagged("get_time", {"free": 1})))
    assert not accepts(auto, f"Hm.\n{tagged('get_weather', {'city': 1})}")
    either = tool_grammar(GRAMMARS["auto"], json_schema_grammar({"type": "array"}), HermesCallParser)
    assert all(accepts(either, text) for text in ("[1]", paris, f"{now}\n{paris}"))
    assert not any(accepts(either, text) for text in ("{}", PARIS, f"[1]{paris}"))


def listed(*calls: str) -> str:
    return f"[{', '.join(calls)}]".replace("parameters", "arguments")


def test_calls_in_a_list_that_are_let_through():
    required = tool_grammar(GRAMMARS["required"], None, XlamCallParser)
    assert all(accepts(required, text) for text in (listed(PARIS), listed(NOW, PARIS, NOW)))
    bad = ["", "[]", PARIS, f"[{PARIS}]", f"text {listed(PARIS)}", listed(PARIS)[:-1], listed(call("get_weather", {}))]
    assert [text for text in bad if accepts(required, text)] == []
    named = tool_grammar(GRAMMARS["named"], None, XlamCallParser)
    assert accepts(named, listed(PARIS))
    assert not accepts(named, listed(PARIS, PARIS))
    auto = tool_grammar(GRAMMARS["auto"], None, XlamCallParser)
    assert all(accepts(auto, text) for text in ("plain", "[]", f"Hm. {listed(NOW, PARIS)}", "[1]"))
    bad = [listed(call("get_weather", {"city": 1})), listed(NOW, call("get_weather", {})), listed(NOW, PARIS)[:-2]]
    assert [text for text in bad if accepts(auto, text)] == []
    either = tool_grammar(GRAMMARS["auto"], json_schema_grammar({"type": "array", "maxItems": 0}), XlamCallParser)
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
    grammar = tool_grammar(tools(WEATHER, TIME, choice=ToolChoice.AUTO), answer)
    assert [text for text in (good, PARIS, f"{NOW}; {PARIS}") if not accepts(grammar, text)] == []
    assert [text for text in (bad, f"{good} {PARIS}", call("get_weather", {}), "") if accepts(grammar, text)] == []


@pytest.mark.parametrize("choice", [ToolChoice.AUTO, ToolChoice.REQUIRED])
def test_no_text_in_a_schema_is_read_as_a_grammar(choice):
    described = {"type": "object", "properties": {"a": {"type": "integer", "description": 'root ::= "a"\nstart: "b"'}}}
    grammar = tool_grammar(tools(FunctionSpec("f", parameters=described, strict=True), choice=choice))
    assert accepts(grammar, call("f", {"a": 1}))
    assert not accepts(grammar, call("f", {"a": "b"}))


def test_a_schema_may_refer_to_itself():
    node = {"type": "object", "properties": {"next": {"$ref": "#"}, "n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    node |= {"additionalProperties": False, "$defs": {"n": {"type": "integer"}}}
    grammar = tool_grammar(tools(FunctionSpec("f", parameters=node), choice=ToolChoice.REQUIRED))
    assert accepts(grammar, call("f", {"next": {"n": 1}, "n": 2}))
    assert not accepts(grammar, call("f", {"next": {}, "n": 2}))


def test_a_schema_that_cannot_be_held_to_is_refused():
    strict = FunctionSpec("f", parameters={"type": "object", "properties": {"a": {"type": "strin"}}})
    with pytest.raises(GrammarError, match="strin"):
        compile_grammar(tool_grammar(tools(strict, choice=ToolChoice.REQUIRED)), BYTES)


@settings(max_examples=examples(25))
@given(
    schemas, st.integers(0, 2**32), st.booleans(), st.sampled_from([JsonCallParser, HermesCallParser, XlamCallParser])
)
def test_whatever_is_drawn_is_read_as_calls_that_are_valid(schema, seed, parallel, form):
    parameters = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    specs = (FunctionSpec("f", parameters=parameters), TIME)
    asked = Tools(specs=specs, choice=ToolChoice.REQUIRED, parallel=parallel)
    text, is_whole = walk(tool_grammar(asked, None, form), np.random.default_rng(seed))
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


NODE = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}, "key": {"type": "string", "pattern": "^[ab]+$"}},
            "required": ["next"],
        },
    ]
}
TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where to."},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": ["string", "null"], "enum": ["it's", "km", None, 5]},
        "dry": {"type": ["boolean", "null"]},
        "stops": {"type": "array", "maxItems": 2, "items": {
            "type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False,
        }},
        "node": {"$ref": "#/$defs/node"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"node": NODE},
}  # fmt: skip
PYTHONIC = tools(FunctionSpec("trip", parameters=TRIP, strict=True), TIME, choice=ToolChoice.AUTO)
PYTHONIC_TEXTS = [
    *("", "Hm [trip].", "Hm. [trip(city='Paris')] Done.", "[ trip(city='a')]\n[trip(city='b')]"),
    """[trip(city="it's", days=3, unit="it's", dry=None)]""",
    "[trip(city='a', unit='km',dry=True, stops=[{'x': -1.5}, {\"x\":2}])]",
    "[trip(city='a', node={'next': {'next': None, 'key': \"ab\"}})]",
    "[get_time(a=1, b={'c': [True, -2e3]}), trip(city='x'), get_time()]",
]
NOT_PYTHONIC_TEXTS = [
    *("[trip()]", "[trip(days=1)]", "[trip('a')]", "[trip(city=1)]", "[trip(city='a', days=12)]", "[trip(city='a'"),
    *("[trip(city='a', unit=5)]", "[trip(city='a', unit='x')]", "[trip(city='a', other=1)]", "Hm [ trip(city=a)]"),
    *("[trip(city='a', stops=[{'x': 1}, {'x': 1}, {'x': 1}])]", "[trip(city='a', stops=[{}])]"),
    *("[trip(city='a', node={'next': {}})]", "[trip(city='a', node={'next': None, 'key': 'c'})]"),
    *("[get_time(), trip(city=1)]", "[get_time(5)]"),
]


def test_calls_in_pythons_form_that_are_let_through():
    grammar = tool_grammar(PYTHONIC, None, PythonicCallParser)
    assert [text for text in PYTHONIC_TEXTS if not accepts(grammar, text)] == []
    assert [text for text in NOT_PYTHONIC_TEXTS if accepts(grammar, text)] == []
    one = Tools(specs=PYTHONIC.specs, choice=ToolChoice.AUTO, parallel=False)
    assert not accepts(tool_grammar(one, None, PythonicCallParser), "[get_time(), get_time()]")


UNFIT = {
    "cannot be the name": {"properties": {"user-id": {}}},
    "keyword `anyOf`": {"anyOf": [{"required": ["a"]}]},
    "`required` a list": {"required": ["a"], "additionalProperties": False},
    "leads to no schema$": {"properties": {"a": {"$ref": "#/$defs/none"}}},
    "leads to no schema here": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "the schema `false`": {"properties": {"a": False}},
    "too large": {"properties": {"a": {"type": ["array"] * 9, "items": {"type": ["array"] * 9, "items": {
        "type": ["array"] * 9, "items": {"type": ["array"] * 9, "items": {"type": ["array"] * 9, "items": {
        "type": ["array"] * 9}}}}}}}},
    "nested too deeply": {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {
        str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1000)}},
    "strin": {"properties": {"a": {"type": "strin"}}},
}  # fmt: skip


@pytest.mark.parametrize("words", UNFIT)
def test_schemas_without_a_form_in_python_are_refused_in_words(words):
    spec = FunctionSpec("f", parameters={"type": "object", **UNFIT[words]}, strict=True)
    with pytest.raises(GrammarError, match=words):
        compile_grammar(tool_grammar(tools(spec, choice=ToolChoice.AUTO), None, PythonicCallParser), BYTES)


@settings(max_examples=examples(40))
@given(schemas, schemas, st.integers(0, 2**32))
def test_what_is_drawn_after_the_start_of_a_pythonic_call_is_valid(schema, other, seed):
    parameters = {"type": "object", "properties": {"value": schema, "other": other}, "required": ["value"]}
    specs = (FunctionSpec("f", parameters=parameters, strict=True), FunctionSpec("g"))
    asked = Tools(specs=specs, choice=ToolChoice.AUTO, parallel=False)
    start = "Well: [f("
    grammar = tool_grammar(asked, None, PythonicCallParser)
    text, is_whole = walk(grammar, np.random.default_rng(seed), start=start)
    parser = PythonicCallParser(asked.names)
    parser.push(text)
    parser.finish()
    content, *calls = parser.take()
    assert content.text == "Well: "
    if is_whole:
        (call,) = calls
        validate(json.loads(call.arguments), {**parameters, "additionalProperties": False})
