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
SEPARATED = {"type": "tags_with_separator", "separator": ", ", "tags": [FA, tag("<b>", ANY, "</b>")]}
DISPATCH = {"type": "dispatch", "rules": [["<a>", INTEGER], ["<b>", const("x")]]}
LISTED = tag('[{"name": "f", "arguments": ', {"type": "json_schema", "json_schema": {"type": "object"}}, "}]")
A, B = "<f=a>1</f>", "<f=b>true</f>"
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (const('a/"ü\n'), ['a/"ü\n'], ["a", ""]),
    "an empty const_string": (const(""), [""], ["a"]),
    "json_schema": (INTEGER, ["12"], ["a", ""]),
    "regex": ({"type": "regex", "pattern": r"a/b\d+"}, ["a/b12"], ["ab", "a/b"]),
    "grammar in EBNF": ({"type": "grammar", "grammar": 'root ::= "x" | "y" root'}, ["x", "yyx"], ["y"]),
    "grammar in Lark": ({"type": "grammar", "grammar": 'start: "x" | "y" start'}, ["x", "yyx"], ["y"]),
    "any_text": (ANY, ["", "x\ny"], []),
    "without some texts": (
        ANY | {"excludes": ["<a", "b\n", "#-&~", "/*"]}, ["a<b", "#"], ["x<a", "b\n", "a/*", "#-&~"],
    ),
    "of few characters": (ANY | {"max_chars": 3}, ["", "üüü"], ["abcd"]),
    "sequence": (of("sequence", const("n="), INTEGER, const(";"), ANY), ["n=1;", "n=12;abc"], ["n=;", "n=1"]),
    "an empty sequence": (of("sequence"), [""], ["a"]),
    "or": (of("or", INTEGER, BOOLEAN, const("x")), ["1", "true", "x"], ["y", "", "1x"]),
    "optional": (of("sequence", {"type": "optional", "content": const("x")}, INTEGER), ["x1", "1"], ["xx1"]),
    "star": ({"type": "star", "content": FA}, ["", A, A + A], ["<", B]),
    "plus": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "aba"]),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": const("ab")}, ["ab", "abab"], ["", "ababab"]),
    "repeat without a limit": ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "aaaa"], ["a"]),
    "repeat nothing": ({"type": "repeat", "min": 0, "max": 0, "content": const("a")}, [""], ["a"]),
    "tag": (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a<</t>"], ["<t>", "<t></t>x", "<t></t></t>"]),
    "a tag on lines": (tag("\n#", ANY, "\n/#"), ["\n#x\n/#"], ["\n#x"]),
    "a tag with two ends": (tag("<t>", ANY, ["</t>", "</u>"]), ["<t></t>", "<t>a</u>"], ["<t>", "<t></t></u>"]),
    "a tag around JSON": (tag("<t>", INTEGER, ["</t>", "</u>"]), ["<t>1</t>", "<t>2</u>"], ["<t>", "<t>a</u>"]),
    "a tag without an end": (of("sequence", tag("<a>", ANY, "")), ["<a>", "<a>xx"], ["x"]),
    "a tag without some texts": (tag("<", ANY | {"excludes": ["x"]}, ">"), ["<a>"], ["<x>"]),
    "a short tag": (tag("<", ANY | {"max_chars": 2}, ">"), ["<ab>", "<>"], ["<abc>"]),
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
    "two triggers": (
        TRIGGERED | {"triggers": ["<f=a", "<f=b"], "excludes": ["zz"]}, [f"a{A}b{B}"], ["<f=b>1</f>", "zz", f"a{A}zz"],
    ),
    "a trigger that begins another": (
        TRIGGERED | {"triggers": ["<f=a>", "<"]}, [f"{A}{B}"], ["<f=b>1</f>", "<f=a>x", "<"],
    ),
    "triggers in a tag": (tag("[", TRIGGERED, "]"), ["[]", "[a]", f"[a{A}b]"], ["[<f=a>a</f>]", "[", "[a]]", "[<f=]"]),
    "tags_with_separator": (SEPARATED, ["", A, f"{A}, <b>x</b>, {A}"], [f"{A},", f"{A}<b>x</b>", f"{A} "]),
    "at least one of them": (SEPARATED | {"at_least_one": True, "separator": ""}, [A, A + A], [""]),
    "at most one of them": (SEPARATED | {"stop_after_first": True}, ["", A], [f"{A}, {A}"]),
    "dispatch": (DISPATCH, ["", "t<a>1 u<b>x<a>2"], ["<a>x", "<b>1"]),
    "dispatch once": (DISPATCH | {"loop": False}, ["", "t<a>1"], ["<a>1 <a>2"]),
    "a list of calls": (
        TRIGGERED | {"triggers": ["<|call|>"], "tags": [
            tag("<|call|>", {"type": "tags_with_separator", "separator": "; ", "tags": [LISTED]}, "<|/call|>"),
        ]},
        ['hi <|call|>[{"name": "f", "arguments": {}}]; [{"name": "f", "arguments": {"a": 1}}]<|/call|>!'],
        ['<|call|>[{"name": "g"', "<|call|>x"],
    ),
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
    assert made.unenforced == ("format.elements.1: uniqueItems (at #)",)


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
        (tag("a", ANY, []), "format.end: must be one text"),
        (tag("a", ANY, ["", "b"]), "format.end: must be one text"),
        (of("sequence", ANY, INTEGER), "format.elements.0: free text must be the last"),
        ({"type": "star", "content": ANY}, "format.content: free text must be the last"),
        (INTEGER | {"style": "qwen_xml"}, '`style` "qwen_xml" is not supported'),
        (INTEGER | {"any_order": True}, "`any_order` true is not supported"),
        (ANY | {"max_tokens": 3}, "`max_tokens` 3 is not supported"),
        (ANY | {"max_chars": True}, "format.max_chars: has a value of a wrong type: true"),
        (ANY | {"max_chars": 10_001}, "`max_chars` must be between 0 and 10000"),
        (ANY | {"excludes": [1]}, "format.excludes: must be a list of texts"),
        (ANY | {"other": 3}, "the field `other` of `any_text` is not supported"),
        ({"type": "const_string"}, "`const_string` needs the field `value`"),
        ({"type": "repeat", "min": 2, "max": 1, "content": INTEGER}, "`max` must be `min` or more"),
        (of("or"), "`or` must have at least one"),
        (TRIGGERED | {"triggers": ["y", ""]}, "format.tags.0: its `begin` must start with one of the triggers"),
        (TRIGGERED | {"tags": [INTEGER]}, "format.tags.0: must be a `tag`, got `json_schema`"),
        (TRIGGERED | {"tags": []}, "format.tags: there must be at least one"),
        ({"type": "dispatch", "rules": [["", INTEGER]]}, "format.rules.0: must be a text and a format"),
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
        format = {"type": "optional", "content": format}
    with pytest.raises(GrammarError, match="nested too deeply"):
        structural_tag_grammar({"format": format})
