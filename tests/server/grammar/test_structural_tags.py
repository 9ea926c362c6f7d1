"""Structural tags: what they let through, byte by byte, and what is refused by name."""

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


def tag(begin: str, schema: Any, end: str) -> dict[str, Any]:
    return {"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


INTEGER, BOOLEAN = {"type": "integer"}, {"type": "boolean"}
FA, FB = {"type": "tag", **tag("<f=a>", INTEGER, "</f>")}, tag("<f=b>", BOOLEAN, "</f>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [FA, FB]}
OLDER = {
    "triggers": ["<f="],
    "structures": [
        {"begin": each["begin"], "end": "</f>", "schema": each["content"]["json_schema"]} for each in (FA, FB)
    ],
}
A, B = "<f=a>1</f>", "<f=b>true</f>"
GOOD = ["", "text", f"x{A}y{B}z", "<f", "<f>"]
BAD = ["<f=", "<f=a>true</f>", "<f=c>", f"{A}<f=b>1", "<f=a>1</f"]


@pytest.mark.parametrize("whole", [{"format": TRIGGERED}, OLDER], ids=["format", "structures"])
def test_a_tag_has_its_schema_and_other_text_is_free(whole: dict[str, Any]) -> None:
    grammar = structural_tag_grammar({"type": "structural_tag", **whole}).text
    assert [text for text in GOOD if not accepts(grammar, text)] == []
    assert [text for text in BAD if accepts(grammar, text)] == []


def test_the_shortest_trigger_of_a_tag_counts() -> None:
    grammar = structural_tag_grammar({"format": TRIGGERED | {"triggers": ["<f=a>", "<"]}}).text
    assert accepts(grammar, A + B)
    assert not any(accepts(grammar, text) for text in ["<f=b>1</f>", "<f=a>x", "<"])


def test_a_tag_may_have_no_end_and_marks_of_json_and_of_expressions() -> None:
    grammar = structural_tag_grammar(
        {"format": TRIGGERED | {"triggers": ['#"/\n'], "tags": [tag('#"/\n', INTEGER, "")]}}
    )
    assert accepts(grammar.text, 'a #"/\n12')
    assert not accepts(grammar.text, '#"/\nx')


def test_what_a_grammar_cannot_hold_is_named_with_its_place() -> None:
    some = tag("<f=c>", {"type": "array", "uniqueItems": True}, "")
    assert structural_tag_grammar({"format": TRIGGERED | {"tags": [FA, some]}}).unenforced == (
        "format.tags.1: uniqueItems",
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_drawn_text_has_whole_tags_only(seed: int) -> None:
    text, is_whole = walk(structural_tag_grammar({"format": TRIGGERED}).text, np.random.default_rng(seed))
    assert not is_whole or text.count("<f=") == text.count("</f>")


@pytest.mark.parametrize(
    ("format", "words"),
    [
        ({}, "needs a `format`"),
        ({"type": ["tag"]}, "needs a `format`"),
        (
            {"type": "any_text"},
            "the format `any_text` is not supported by this server; it takes `type` `triggered_tags`",
        ),
        (TRIGGERED | {"at_least_one": True}, "the field `at_least_one` is not supported"),
        (TRIGGERED | {"mood": 1}, "the field `mood` is not supported"),
        (TRIGGERED | {"triggers": ["y", "", 3]}, "format.tags.0: its `begin` must start with one of the triggers"),
        (TRIGGERED | {"tags": [FA, INTEGER]}, "format.tags.1: is not supported"),
        (TRIGGERED | {"tags": [FA | {"mood": 1}]}, "format.tags.0: is not supported"),
        (TRIGGERED | {"tags": [FA | {"content": {"type": "any_text"}}]}, "format.tags.0: is not supported"),
        (TRIGGERED | {"tags": [FA | {"content": FA["content"] | {"style": "xml"}}]}, "format.tags.0: is not supported"),
        (TRIGGERED | {"tags": []}, "needs at least one tag"),
        (TRIGGERED | {"tags": [tag("<f=", {"type": "strin"}, "")]}, "Invalid type: strin"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(format: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        structural_tag_grammar({"format": format})


@pytest.mark.parametrize(
    "whole",
    [{}, {"format": 1}, {"structures": [], "triggers": []}, {"structures": [1], "triggers": []}, {"triggers": ["<"]}],
)
def test_a_tag_in_neither_form_is_refused(whole: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=r"needs a `format`|structures\.0: a structure needs|at least one tag"):
        structural_tag_grammar(whole)
