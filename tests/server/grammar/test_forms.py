"""What each form lets through, byte by byte, and what is refused in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from batcher.grammar import GrammarError
from batcher.requests.deep_threads import deep_threads
from server.grammar.compiler import Vocabulary, compile_grammar
from server.grammar.forms import (
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    schema_grammar,
)
from server.grammar.schemas import MAX_GRAMMAR_CHARS

BYTES = Vocabulary.of_bytes()


def accepts(grammar: str, text: str) -> bool:
    matcher = compile_grammar(grammar, BYTES)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            json_schema_grammar({"type": "object"}),
            ["{}", '{"a": [1, "ü"]}', '{\n  "a": null\n}'],
            ["[]", "1", '{"a"}', "{} "],
        ),
        (json_schema_grammar({"enum": ["a", 2]}), ['"a"', "2"], ['"b"', "a"]),
        (json_schema_grammar(True), ["1", '"x"', "[{}]"], ["x"]),
        (regex_grammar(r"\d{2}|ü+"), ["12", "üü"], ["1", "123", "u"]),
        (choice_grammar(["yes", 'n"o\n', "((("]), ["yes", 'n"o\n', "((("], ["y", "yesno"]),
        (lark_grammar('start: "a" start | "b"'), ["b", "aab"], ["a", "ba"]),
        (lark_grammar('root ::= "a" ("b" | "c")+'), ["abcb"], ["a"]),
        (lark_grammar('start: "<" %json {"type": "boolean"} ">"'), ["<true>"], ["<1>"]),
    ],
)
def test_forms(grammar: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: json_schema_grammar({"type": "strin"}), r"Invalid type: strin \(at #\)"),
        (
            lambda: json_schema_grammar({"properties": {"a": {"items": {"properties": {"b/c": {"type": "x"}}}}}}),
            r"Invalid type: x \(at #/properties/a/items/properties/b~1c\)",
        ),
        (
            lambda: schema_grammar({"anyOf": [{}, {"contains": {}}]}, strict=True).text,
            "cannot hold the keyword contains; leave it out",
        ),
        (lambda: json_schema_grammar({"$ref": "#/nowhere"}), "'/nowhere' does not exist"),
        (lambda: json_schema_grammar({"$ref": "http://127.0.0.1:1/x"}), "does not fetch"),
        (lambda: json_schema_grammar({"minimum": 5, "maximum": 1, "type": "integer"}), "minimum .5. is greater"),
        (lambda: json_schema_grammar({"pattern": "(a", "type": "string"}), "unclosed group"),
        (lambda: json_schema_grammar(False), "nothing is valid"),
        (lambda: json_schema_grammar(nested(200)), "recursion limit"),
        (lambda: json_schema_grammar(nested(100_000)), "nested too deeply|characters"),
        (lambda: regex_grammar("a("), "unclosed group"),
        (lambda: regex_grammar("(" * 200 + ")" * 200), "200 brackets; at most 128"),
        (lambda: regex_grammar("a" * (MAX_GRAMMAR_CHARS + 1)), "65537 characters; at most 65536"),
        (lambda: choice_grammar([]), "at least one choice"),
        (lambda: lark_grammar('start: "a" b'), "unknown name"),
        (lambda: lark_grammar('start: "a" <|eot_id|>'), "compiler failed"),
        (lambda: lark_grammar("root ::= (("), "EBNF"),
        (lambda: lark_grammar('start: %json {"contains": {}}'), "cannot hold the keyword contains"),
        (lambda: lark_grammar(f'start: "a" %json {{"const": {-(2**63)}}}'), "cannot hold the keyword const"),
        (lambda: lark_grammar(f'start: %json {{"minimum": {-(2**63)}}}'), "cannot hold the keyword minimum"),
        (lambda: lark_grammar("start: %json // no schema"), "there must be a JSON schema"),
        (lambda: lark_grammar('{"grammars": [{"json_schema": {}}]}'), "must be in Lark"),
    ],
)
def test_what_cannot_be_had_is_refused_in_words(make, words: str) -> None:
    with pytest.raises(GrammarError, match=words) as caught:
        compile_grammar(make(), BYTES)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


HOSTILE = {
    "a chain of references": {"$ref": "#/$defs/0"}
    | {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1500)} | {"1500": {}}},
    "a reference to itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "a huge enumeration": {"enum": [f"value {i}" for i in range(4000)]},
    "alternatives to the twentieth power": {
        "allOf": [{"anyOf": [{"properties": {f"{x}{i}": {"const": i}}} for x in "ab"]} for i in range(20)]
    },
    "doubling definitions": {"$ref": "#/$defs/0"}
    | {"$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)} | {"40": {}}},
    "very many properties": {"properties": {f"p{i}": {"type": "integer"} for i in range(1500)}},
    "a catastrophic pattern": {"type": "string", "pattern": "^(.*a.{30})*(x+x+)+y$"},
    "repetitions of repetitions": {"type": "string", "pattern": "((((a{1,99}){1,99}){1,99}){1,99})"},
    "long arrays of long arrays": nested(3) | {"minItems": 100_000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_end_in_a_verdict(name: str) -> None:
    """In a thread with a deep stack, as in the product: what recursed without a limit would end the process."""
    with deep_threads(1, "test") as threads:
        fault = threads.submit(_verdict, lambda: json_schema_grammar(HOSTILE[name])).result(timeout=60)
    assert len(fault) < 700


def test_rules_that_call_each_other_in_a_long_chain() -> None:
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + '\nr3000: "z"'
    with deep_threads(1, "test") as threads:
        assert threads.submit(_verdict, lambda: lark_grammar(chain)).result(timeout=60) == ""


def _verdict(make: Callable[[], str]) -> str:
    try:
        matcher = compile_grammar(make(), BYTES)
    except GrammarError as error:
        return str(error)
    matcher.compute_bitmask()
    return ""
