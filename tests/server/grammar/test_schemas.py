"""JSON schemas as people write them: what a grammar holds of them, measured by another validator."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from batcher.grammar import GrammarError
from server.grammar.compiler import Vocabulary, compile_grammar
from server.grammar.forms import held_schema_grammar, json_schema_grammar
from server.grammar.schemas import held_schema
from tests.examples import examples

BYTES = Vocabulary.of_bytes()
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
COLOURS = {"$defs": {"Colour": {"enum": ["red", "green"], "type": "string"}}}


def accepts(schema: Any, value: Any) -> bool:
    text = list(json.dumps(value, ensure_ascii=False).encode())
    matcher = compile_grammar(json_schema_grammar(schema), BYTES)
    return matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()


# Schemas whose keywords other keywords replace: nothing is lost.
HELD: dict[str, Any] = {
    "not a type": {"not": {"type": ["string", "object"]}},
    "not one of the types": {"type": ["integer", "string"], "not": {"type": "integer"}},
    "not some values": {"enum": [1, True, "a", None], "not": {"enum": [True, "a"]}},
    "not a property": OBJECT | {"not": {"required": ["a"]}},
    "a condition on a value": OBJECT
    | {
        "properties": OBJECT["properties"] | {"k": {"enum": ["x", "y", "z"]}},
        "required": ["k"],
        "if": {"properties": {"k": {"const": "x"}}, "required": ["k"]},
        "then": {"required": ["a"]},
        "else": {"properties": {"b": False}},
    },
    "names from a list": {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/Colour"},
        "additionalProperties": {"type": "integer"},
    }
    | COLOURS,
    "names by a pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^[ab]"},
        "additionalProperties": {"type": "null"},
    },
    "what needs another": OBJECT | {"dependentRequired": {"a": ["b"]}},
    "the older name of that": OBJECT
    | {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}},
    "nothing unevaluated": OBJECT | {"unevaluatedProperties": False},
    "no unevaluated items": {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    "one of several types": {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "array", "maxItems": 1}]},
    "one of several kinds": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "x"}, "a": {"type": "integer"}}, "required": ["k", "a"]},
            {
                "type": "object",
                "properties": {"k": {"enum": ["y", "z"]}},
                "required": ["k"],
                "additionalProperties": False,
            },
        ]
    },
    "one of several open types": {"oneOf": [{"enum": ["a", None]}, {"type": ["integer", "array"]}]},
    "one of several closed objects": {
        "oneOf": [
            {"type": "object", "properties": {name: {}}, "required": [name], "additionalProperties": False}
            for name in ("a", "b", "k")
        ]
    },
    "one of several in a property": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"type": kind, "maxLength": 1}}, "required": ["k"]}
            for kind in ("string", "boolean")
        ]
    },
    "one of two properties": OBJECT | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one of three properties": OBJECT | {"oneOf": [{"required": [name]} for name in ("a", "b", "k")]},
    "not two properties": OBJECT | {"not": {"required": ["a", "b"]}},
    "a condition on a boolean": OBJECT
    | {
        "properties": OBJECT["properties"] | {"k": {"type": "boolean"}},
        "required": ["k"],
        "if": {"properties": {"k": {"const": True}}},
        "then": {"required": ["b"]},
    },
    "a condition on a presence": OBJECT
    | {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"properties": {"b": {"maximum": 0}}}},
    "several conditions": OBJECT
    | {
        "properties": OBJECT["properties"] | {"k": {"enum": ["x", "y", "z"]}},
        "required": ["k"],
        "allOf": [
            {"if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["a"]}},
            {"if": {"properties": {"k": {"enum": ["y", "x"]}}}, "then": {"required": ["b"]}},
            {"properties": {"b": {"minimum": 0}}},
        ],
    },
    "what needs a schema": OBJECT
    | {"dependentSchemas": {"a": {"properties": {"b": {"minimum": 0}}, "required": ["b"]}}},
    "short names": {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}},
    "nothing unevaluated after others": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "allOf": [{"$ref": "#/$defs/b"}, {"properties": {"k": {}}, "required": ["k"]}],
        "unevaluatedProperties": False,
        "$defs": {"b": {"properties": {"b": {"type": "integer"}}}},
    },
    "one more than those required": OBJECT | {"minProperties": 1, "additionalProperties": False},
    "as many as are required": OBJECT | {"required": ["a"], "minProperties": 1, "maxProperties": 1},
    "as many as are listed": OBJECT | {"maxProperties": 2, "additionalProperties": False},
    "a single item is unique": {"type": "array", "items": {"type": "integer"}, "maxItems": 1, "uniqueItems": True},
}
# Schemas with a keyword that nothing replaces, and the keyword.
UNHELD: dict[str, tuple[Any, str]] = {
    "a set": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems (at #)"),
    "one of two that overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf (at #)"),
    "a list that contains a value": (
        {"type": "object", "properties": {"a/b": {"type": "array", "contains": {"const": 1}, "minContains": 2}}},
        "contains (at #/properties/a~1b)",
    ),
    "not a range": ({"type": "integer", "not": {"minimum": 3}}, "not (at #)"),
    "a condition on a number": ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 4}}, "if (at #)"),
    "names of a format": ({"type": "object", "propertyNames": {"format": "date"}}, "propertyNames (at #)"),
    "a number of properties": (OBJECT | {"maxProperties": 1}, "maxProperties (at #)"),
    "one of two properties that are required": (
        OBJECT | {"required": ["a"], "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "oneOf (at #)",
    ),
    "look-around": ({"type": "array", "items": {"pattern": "^(?!a)", "type": "string"}}, "pattern (at #/items)"),
    "a reference back": ({"type": "string", "pattern": r"^(a|b)\1$"}, "pattern (at #)"),
    "unevaluated after a choice": (
        OBJECT | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "unevaluatedProperties": False},
        "unevaluatedProperties (at #)",
    ),
}
names = st.sampled_from(["a", "b", "k", "red", "green", "zz"])
leaves = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["a", "b", "x", "y", "z", "bb"]))
values = st.one_of(leaves, st.lists(leaves, max_size=3), st.dictionaries(names, leaves, max_size=4))


def in_order(value: Any, schema: Any) -> Any:
    """An object's properties in the order in which a grammar wants them: those of the schema first."""
    if not isinstance(value, dict):
        return value
    known = [*held_schema(schema).schema.get("properties", {}), "k", "a", "b"]
    return dict(sorted(value.items(), key=lambda item: known.index(item[0]) if item[0] in known else len(known)))


@pytest.mark.parametrize("name", HELD)
@settings(max_examples=examples(60))
@given(value=values)
def test_what_is_replaced_lets_through_what_is_valid_and_nothing_else(name: str, value: Any) -> None:
    schema = HELD[name]
    assert held_schema(schema, strict=True).unenforced == ()
    assert accepts(schema, in_order(value, schema)) == Draft202012Validator(_newer(schema)).is_valid(value)


def _newer(schema: Any) -> Any:
    """The draft of 2020 has another name for it."""
    return {{"dependencies": "dependentRequired"}.get(key, key): value for key, value in schema.items()}


@pytest.mark.parametrize("name", UNHELD)
@settings(max_examples=examples(60))
@given(value=values)
def test_what_is_left_out_is_named_and_keeps_out_nothing_that_is_valid(name: str, value: Any) -> None:
    schema, left_out = UNHELD[name]
    assert held_schema(schema).unenforced == (left_out,)
    if Draft202012Validator(schema).is_valid(value):
        assert accepts(schema, in_order(value, schema))


@pytest.mark.parametrize("name", UNHELD)
def test_strict_asks_for_the_whole_schema(name: str) -> None:
    schema, left_out = UNHELD[name]
    with pytest.raises(GrammarError, match="a grammar cannot hold the keyword") as caught:
        held_schema_grammar(schema, strict=True)
    assert left_out in str(caught.value)


@pytest.mark.parametrize(
    "name", ["password", "path", "binary", "byte", "url", "base64", "regex", "iri", "int32", "color"]
)
def test_an_unknown_format_is_an_annotation(name: str) -> None:
    schema = {"type": "string", "format": name, "maxLength": 3}
    assert held_schema(schema, strict=True).unenforced == ()
    assert accepts(schema, "abc")
    assert not accepts(schema, "abcd")


def test_formats_of_pydantic_are_those_that_they_mean() -> None:
    schema = {"type": "string", "format": "uuid4"}
    assert accepts(schema, "123e4567-e89b-42d3-a456-426614174000")
    assert not accepts(schema, "abc")


junk = st.recursive(st.one_of(leaves, st.just({})), lambda inner: st.lists(inner, max_size=2), max_leaves=3)


@settings(max_examples=examples(1500))
@given(st.sampled_from([*HELD.values(), *(schema for schema, _ in UNHELD.values())]), st.data())
def test_a_schema_with_junk_in_it_is_read_or_refused_in_words(schema: Any, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from([*schema, "required", "properties", "allOf"]), min_size=1, max_size=2))
    broken = {**schema, **{name: data.draw(junk) for name in names}}
    try:
        grammar = json_schema_grammar(broken)
    except GrammarError:
        return
    with contextlib.suppress(GrammarError):
        compile_grammar(grammar, BYTES)
