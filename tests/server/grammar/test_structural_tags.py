"""Structural tags: what each format lets through, byte by byte, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batcher.grammar import GrammarError
from server.grammar.compiler import Vocabulary, compile_grammar
from server.grammar.structural_tags import structural_tag_grammar
from tests.server.grammar.test_matcher import walk

BYTES = Vocabulary.of_bytes()


def accepts(grammar: str, text: str) -> bool:
    matcher = compile_grammar(grammar, BYTES)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(type: str, *elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": type, "elements": list(elements)}


ANY = {"type": "any_text"}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
BOOLEAN = {"type": "json_schema", "json_schema": {"type": "boolean"}}
THINK = tag("<think>", ANY, "</think>")
FA, FB = tag("<f=a>", INTEGER, "</f>"), {"begin": "<f=b>", "content": BOOLEAN, "end": "</f>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [FA, FB]}
A, B = "<f=a>1</f>", "<f=b>true</f>"
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (const('a/"ü\n'), ['a/"ü\n'], ["a", ""]),
    "an empty const_string": (const(""), [""], ["a"]),
    "json_schema": (INTEGER, ["12"], ["a", ""]),
    "regex": ({"type": "regex", "pattern": r"a/b\d+"}, ["a/b12"], ["ab", "a/b"]),
    "grammar in EBNF": ({"type": "grammar", "grammar": 'root ::= "x" | "y" root'}, ["x", "yyx"], ["y"]),
    "grammar in Lark": ({"type": "grammar", "grammar": 'start: "x" | "y" start'}, ["x", "yyx"], ["y"]),
    "any_text": (ANY, ["", "x\ny"], []),
    "sequence": (of("sequence", const("n="), INTEGER, const(";"), ANY), ["n=1;", "n=12;abc"], ["n=;", "n=1"]),
    "an empty sequence": (of("sequence"), [""], ["a"]),
    "or": (of("or", INTEGER, BOOLEAN, const("x")), ["1", "true", "x"], ["y", "", "1x"]),
    "tag": (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a<</t>"], ["<t>", "<t></t>x", "<t></t></t>"]),
    "a tag on lines": (tag("\n#", ANY, "\n/#"), ["\n#x\n/#"], ["\n#x"]),
    "a tag without an end": (of("sequence", tag("<a>", ANY, "")), ["<a>", "<a>xx"], ["x"]),
    "an end after a choice": (tag("<", of("or", ANY, INTEGER), ">"), ["<>", "<1>", "<xx>"], ["<1>>"]),
    "an end after a sequence": (tag("<", of("sequence", const("a"), ANY), ">"), ["<a>", "<ab>"], ["<b>"]),
    "thoughts first": (of("sequence", THINK, TRIGGERED), [f"<think>{A}?</think>a{B}"], [A, f"<think></think>{A[:-1]}"]),
    "triggered_tags": (TRIGGERED, ["", "text", f"x{A}y{B}z", "<f"], ["<f=", "<f=a>true</f>", "<f=c>", f"{A}<f=b>1"]),
    "at least one": (TRIGGERED | {"at_least_one": True}, [A, f"{A}y{B}z"], ["", "x", f"x{A}", f"{A}<f=b>1</f>"]),
    "at most one": (TRIGGERED | {"stop_after_first": True}, ["", "x", f"x{A}"], [f"{A}x", A + A]),
    "one tag": (
        of("sequence", TRIGGERED | {"at_least_one": True, "stop_after_first": True}, const(".")),
        [f"{A}.", f"{B}."], ["", ".", f"x{A}.", A],
    ),
    "a trigger that begins another": (
        TRIGGERED | {"triggers": ["<f=a>", "<"]}, [f"{A}{B}"], ["<f=b>1</f>", "<f=a>x", "<"],
    ),
    "triggers in a tag": (tag("[", TRIGGERED, "]"), ["[]", "[a]", f"[a{A}b]"], ["[<f=a>a</f>]", "[", "[a]]", "[<f=]"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_lets_through(name: str) -> None:
    format, good, bad = FORMATS[name]
    grammar = structural_tag_grammar({"type": "structural_tag", "format": format}).text
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_the_older_form_is_triggered_tags() -> None:
    call = {"begin": "<call>", "schema": {"type": "integer"}, "end": "</call>"}
    grammar = structural_tag_grammar({"structures": [call], "triggers": ["<call>"]}).text
    assert all(accepts(grammar, text) for text in ["no call", "x <call>12</call> y"])
    assert not any(accepts(grammar, text) for text in ["<call>a</call>", "<call>1"])


def test_what_a_grammar_cannot_hold_is_named_with_its_place() -> None:
    schema = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
    made = structural_tag_grammar({"format": of("or", ANY, schema)})
    assert made.unenforced == ("format.elements.1: uniqueItems",)


def test_nested_tags_stay_small() -> None:
    format = INTEGER
    for i in range(50):
        inner = tag(f"<{i}>", format, f"</{i}>")
        format = {"type": "triggered_tags", "triggers": ["<"], "tags": [inner], "at_least_one": True}
        format |= {"stop_after_first": True}
    grammar = structural_tag_grammar({"format": format}).text
    begins, ends = (
        "".join(f"<{mark}{i}>" for i in order) for mark, order in [("", range(49, -1, -1)), ("/", range(50))]
    )
    assert accepts(grammar, f"{begins}7{ends}")
    assert len(grammar) < 20_000


@pytest.mark.parametrize("seed", range(5))
def test_a_drawn_text_has_whole_tags_only(seed: int) -> None:
    format = TRIGGERED | {"at_least_one": True, "stop_after_first": True}
    text, is_whole = walk(structural_tag_grammar({"format": format}).text, np.random.default_rng(seed))
    assert is_whole
    assert text.startswith(("<f=a>", "<f=b>"))
    assert text.endswith("</f>")


@pytest.mark.parametrize(
    ("format", "words"),
    [
        ({}, "format: must be an object with a `type`"),
        ({"type": "token", "token": 1}, "format `token` is not"),
        ({"type": ["tag"]}, r"format `\['tag'\]` is not"),
        (of("or", ANY, {"type": "qwen_xml_parameter"}), r"format.elements.1: the format `qwen_xml_parameter` is not"),
        (tag({"type": "token", "token": 3}, ANY, "x"), r"format.begin: has a value of a wrong type: \{.type.: .token"),
        (of("sequence", ANY, INTEGER), "format.elements.0: free text must be the last"),
        (INTEGER | {"style": "qwen_xml"}, '`style` "qwen_xml" is not supported'),
        (INTEGER | {"any_order": True}, "the field `any_order` of `json_schema` is not supported"),
        ({"type": "star", "content": ANY}, "the format `star` is not supported"),
        (tag("a", ANY, ["b"]), r"format.end: has a value of a wrong type: \["),
        (ANY | {"other": 3}, "the field `other` of `any_text` is not supported"),
        ({"type": "const_string"}, "`const_string` needs the field `value`"),
        (of("or"), "`or` must have at least one"),
        (TRIGGERED | {"triggers": ["y", ""]}, "format.tags.0: its `begin` must start with one of the triggers"),
        (TRIGGERED | {"tags": [INTEGER]}, "format.tags.0: must be a `tag`, got `json_schema`"),
        (TRIGGERED | {"tags": []}, "format.tags: there must be at least one"),
        (tag("", {"type": "json_schema", "json_schema": {"type": "strin"}}, ""), "Invalid type: strin"),
        ({"type": "regex", "pattern": "("}, "unclosed group"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(format: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        compile_grammar(structural_tag_grammar({"format": format}).text, BYTES)


@pytest.mark.parametrize(
    "whole",
    [{}, {"format": 1}, {"structures": [], "triggers": []}, {"structures": [1], "triggers": []}, {"triggers": ["<"]}],
)
def test_a_tag_in_neither_form_is_refused(whole: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=r"needs a `format`|structures\.0: a structure needs"):
        structural_tag_grammar(whole)


def test_formats_nested_too_deeply_are_refused() -> None:
    format = INTEGER
    for _ in range(3000):
        format = of("or", format)
    with pytest.raises(GrammarError, match="nested too deeply"):
        structural_tag_grammar({"format": format})
