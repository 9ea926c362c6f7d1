"""JSON schemas as people write them: what a grammar holds of them, measured by another validator."""

from __future__ import annotations

import contextlib
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from batcher.grammar import GrammarError
from server.grammar.compiler import Vocabulary, compile_grammar
from server.grammar.forms import json_schema_grammar, schema_grammar
from tests.examples import examples
from tests.server.grammar.test_matcher import walk
from tests.server.grammar.test_schema_collection import keywords

BYTES = Vocabulary.of_bytes()
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


@cache
def start_of(schema: str, strict: bool) -> LLMatcher:
    return compile_grammar(schema_grammar(json.loads(schema), strict=strict).text, BYTES)


def accepts_text(schema: Any, text: str, *, strict: bool = True) -> bool:
    matcher, data = start_of(json.dumps(schema), strict).deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def accepts(schema: Any, value: Any) -> bool:
    return accepts_text(schema, json.dumps(value, ensure_ascii=False), strict=False)


# Schemas that are held whole.
HELD: dict[str, Any] = {
    "nothing unevaluated": OBJECT | {"unevaluatedProperties": False},
    "no unevaluated items": {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    "anything unevaluated": OBJECT | {"anyOf": [{"required": ["a"]}], "unevaluatedProperties": True},
    "items that may be equal": {"type": "array", "uniqueItems": False},
    "names of any text": {"type": "object", "propertyNames": {"type": "string"}},
    "one of several types": {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "array", "maxItems": 1}]},
    "one of several kinds": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "x"}, "a": {"type": "integer"}}, "required": ["k", "a"]},
            {"type": "object", "properties": {"k": {"enum": ["y", "z"]}}, "required": ["k"]},
        ]
    },
    "one more than those required": OBJECT | {"minProperties": 1, "additionalProperties": False},
    "as many as are required": OBJECT | {"required": ["a", "b"], "minProperties": 2, "maxProperties": 2},
    "a condition without a consequence": OBJECT | {"then": {"required": ["a"]}},
}
# Schemas with keywords that are not held, and these.
UNHELD: dict[str, tuple[Any, str]] = {
    "a set": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
    "one of two that overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "a list that contains a value": (
        {"type": "object", "properties": {"a/b": {"type": "array", "contains": {"const": 1}, "minContains": 2}}},
        "contains",
    ),
    "not a range": ({"type": "integer", "not": {"minimum": 3}}, "not"),
    "a condition on a number": ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 4}}, "if"),
    "names of a format": ({"type": "object", "propertyNames": {"format": "date"}}, "propertyNames"),
    "a number of properties": (OBJECT | {"maxProperties": 1}, "maxProperties"),
    "one of two properties that are required": (
        OBJECT | {"required": ["a"], "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "oneOf",
    ),
    "look-around": ({"type": "array", "items": {"pattern": "^(?!a)", "type": "string"}}, "pattern"),
    "a reference back": ({"type": "string", "pattern": r"^(a|b)\1$"}, "pattern"),
    "names by a pattern": ({"type": "object", "propertyNames": {"pattern": "^[ab]"}}, "propertyNames"),
    "what needs another": (OBJECT | {"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "not a type": ({"not": {"type": ["string", "object"]}}, "not"),
    "a condition on a presence": (OBJECT | {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    "more properties than are required": (
        OBJECT | {"additionalProperties": False, "minProperties": 2},
        "minProperties",
    ),
    "names that do not fit a pattern": (
        {"type": "object", "patternProperties": {"^(?!a)": False, "^b": {"type": "integer"}}},
        "patternProperties",
    ),
    "unevaluated after a choice": (
        OBJECT | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "unevaluatedProperties": False},
        "unevaluatedProperties",
    ),
}
names = st.sampled_from(["a", "b", "k", "red", "green", "zz"])
leaves = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["a", "b", "x", "y", "z", "bb"]))
values = st.one_of(leaves, st.lists(leaves, max_size=3), st.dictionaries(names, leaves, max_size=4))


def in_order(value: Any, schema: Any) -> Any:
    """An object's properties in the order in which a grammar wants them: those of the schema first."""
    if not isinstance(value, dict):
        return value
    known = [*schema.get("properties", {}), "k", "a", "b"]
    return dict(sorted(value.items(), key=lambda item: known.index(item[0]) if item[0] in known else len(known)))


@pytest.mark.parametrize("name", HELD)
@settings(max_examples=examples(60))
@given(value=values)
def test_what_is_held_lets_through_what_is_valid_and_nothing_else(name: str, value: Any) -> None:
    schema = HELD[name]
    assert schema_grammar(schema, strict=True).unenforced == ()
    assert accepts(schema, in_order(value, schema)) == Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize("name", UNHELD)
@settings(max_examples=examples(60))
@given(value=values)
def test_what_is_left_out_is_named_and_keeps_out_nothing_that_is_valid(name: str, value: Any) -> None:
    schema, left_out = UNHELD[name]
    assert schema_grammar(schema).unenforced == (left_out,)
    if Draft202012Validator(schema).is_valid(value):
        assert accepts(schema, in_order(value, schema))


@pytest.mark.parametrize("name", UNHELD)
def test_strict_asks_for_the_whole_schema(name: str) -> None:
    schema, left_out = UNHELD[name]
    with pytest.raises(GrammarError, match="a grammar cannot hold the keyword") as caught:
        schema_grammar(schema, strict=True)
    assert left_out in str(caught.value)


@pytest.mark.parametrize(
    "name", ["password", "path", "binary", "byte", "url", "base64", "regex", "iri", "int32", "color"]
)
def test_an_unknown_format_is_an_annotation(name: str) -> None:
    schema = {"type": "string", "format": name, "maxLength": 3}
    assert schema_grammar(schema, strict=True).unenforced == ()
    assert accepts(schema, "abc")
    assert not accepts(schema, "abcd")


def test_formats_of_pydantic_are_those_that_they_mean() -> None:
    schema = {"type": "string", "format": "uuid4"}
    assert accepts(schema, "123e4567-e89b-42d3-a456-426614174000")
    assert not accepts(schema, "abc")


LONG = [2**53 + 1, 1234567890123456789, -(2**53) - 1, 2**63 - 1, -(2**63), 2**64 + 1, 10**30 + 1, 1e22, -1.7e308,
        5e-324, -1.1892378059464719]  # fmt: skip
AROUND: dict[str, Any] = {  # a schema around another one, which stands for a question mark
    "alone": "?",
    "a property": {"type": "object", "properties": {"id": "?", "b": {}}, "required": ["id"]},
    "an optional property": {"type": "object", "properties": {"a": {}, "id": "?"}},
    "a list": {"type": "array", "items": "?", "minItems": 2, "maxItems": 2},
    "a choice": {"anyOf": [{"type": "null"}, "?"]},
    "a definition": {"$ref": "#/$defs/id", "$defs": {"id": "?"}},
}


def replaced(around: Any, inner: Any) -> Any:
    """`around` with `inner` for each question mark."""
    if isinstance(around, dict):
        return {key: replaced(value, inner) for key, value in around.items()}
    if isinstance(around, list):
        return [replaced(value, inner) for value in around]
    return inner if around == "?" else around


@pytest.mark.parametrize("number", LONG)
@pytest.mark.parametrize("inner", [{"const": "?"}, {"enum": ["a", "?"]}, {"enum": [{"ids": ["?", True]}]}])
def test_a_constant_that_is_no_double_is_left_out_and_named(number: float, inner: dict[str, Any]) -> None:
    (name,), constant = inner, replaced(inner, number)
    schema = {"type": "object", "properties": {"id": constant}, "required": ["id"]}
    value = constant[name][-1] if name == "enum" else constant[name]
    assert schema_grammar(schema).unenforced == (name,)
    assert accepts(schema, {"id": value})
    with pytest.raises(GrammarError, match=f"cannot hold the keyword {name}"):
        schema_grammar(schema, strict=True)


numbers = st.one_of(
    st.sampled_from([*LONG, 2**53, 10**17, 2**59, 0.1, 1e-7, -1e300, 2**63, 2.0**60]),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-9, 9),
)
bounds = st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
numeric = st.one_of(
    numbers.map(lambda number: {"const": number}),
    st.lists(numbers, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.builds(lambda kind, given: {"type": kind} | given, st.sampled_from(["integer", "number"]),
              st.dictionaries(bounds, numbers, max_size=2)),
    st.sampled_from([2, 1000, 2**31, 2**53 + 1]).map(lambda of: {"type": "integer", "multipleOf": of}),
)  # fmt: skip


@settings(max_examples=examples(150))
@given(numeric, st.sampled_from([*AROUND]), st.integers(0, 2**32))
def test_whatever_numbers_a_schema_has_an_answer_breaks_named_keywords_only(inner, around, seed) -> None:
    schema = replaced(AROUND[around], inner)
    try:
        made = schema_grammar(schema)
    except GrammarError as error:
        assert "Unsatisfiable" in str(error)  # noqa: PT017 - a range may be empty
        return
    text, is_whole = walk(made.text, np.random.default_rng(seed), 300)
    if is_whole:
        wrong = list(Draft202012Validator(schema).iter_errors(json.loads(text)))
        assert [error for error in wrong if set(made.unenforced).isdisjoint(keywords(error))] == []


def test_multiples_whose_product_overflows_the_compilers_numbers_are_named() -> None:
    schema = {"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]}
    assert schema_grammar(schema).unenforced == ("multipleOf",)
    assert accepts(schema, 65537 * 65539)
    schema = {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}
    assert accepts_text(schema, str(997 * 991))
    assert not accepts_text(schema, str(997 * 990))


@pytest.mark.parametrize(
    ("bound", "is_held"),
    [
        ({"maximum": 2**53}, True),
        ({"minimum": -(2**59)}, True),
        ({"exclusiveMaximum": 0.1}, True),
        ({"minimum": -0.24607599198295455}, False),
        ({"maximum": 2**53 + 1}, False),
        ({"minimum": -(2**63)}, False),
        ({"maximum": 2**63 - 1}, False),
        ({"maximum": 2**64 - 1}, False),
        ({"minimum": -1.7976931348623157e308}, False),
        ({"exclusiveMinimum": 5e-324}, False),
        ({"multipleOf": 0.01}, True),
        ({"multipleOf": 0.07}, False),
    ],
)
def test_a_bound_is_held_or_named(bound: dict[str, float], is_held: bool) -> None:
    ((name, value),) = bound.items()
    schema = {"type": "number", **bound}
    assert schema_grammar(schema).unenforced == (() if is_held else (name,))
    assert accepts(schema, int(value) if abs(value) > 1 else 7 if name == "exclusiveMinimum" else 0)
    if not is_held:
        with pytest.raises(GrammarError, match=f"cannot hold the keyword {name}"):
            schema_grammar(schema, strict=True)


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
