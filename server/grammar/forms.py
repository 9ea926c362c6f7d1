"""Converts all forms of structured output to one: a grammar, a text in llguidance's format.

    grammar = json_schema_grammar({"type": "object", "properties": {"city": {"type": "string"}}})
    grammar = lark_grammar('start: "yes" | "no"')
    await state.grammars.check(grammar, param="tools")   # RequestError 400 if it cannot be compiled
    SamplingParams(..., grammar=grammar)                 # the output is a text of the grammar, then an end token

In a Lark grammar `%json {...}` stands for a JSON schema, so text and JSON may alternate. No grammar contains special
tokens: the engine never allows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batcher.grammar import GrammarError
from server.grammar.schemas import MAX_GRAMMAR_CHARS, enforceable_schema

MAX_NESTING = 128  # brackets inside brackets, in a pattern or a grammar; JSON has the same limit
# White space between JSON's marks is bounded, because a model might otherwise repeat it without end. `lenient` ignores
# keywords of a schema that the compiler does not know, and warns of them.
JSON_OPTIONS = {"whitespace_pattern": r"[ \n]{0,16}", "lenient": True}


_BUDGET = "%thinking_budget "


class Grammar(NamedTuple):
    """A grammar's text ("": any text), and the keywords of a JSON schema that it does not enforce."""

    text: str
    unenforced: tuple[str, ...] = ()


def json_schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """A grammar of JSON texts that match the part of `schema` that a grammar can enforce."""
    return schema_grammar(schema).text


def schema_grammar(schema: Mapping[str, Any] | bool, *, strict: bool = False) -> Grammar:
    """A grammar of JSON texts that match the part of `schema` that a grammar can enforce, and the other keywords.

    Raises GrammarError if the schema is too large or wrong, or if `strict` and a keyword cannot be enforced.
    """
    held = enforceable_schema(schema, JSON_OPTIONS, strict=strict)
    return Grammar(lark_grammar(f"start: {held.expression}", foreign=False), held.unenforced)


def regex_grammar(pattern: str) -> str:
    """A grammar of texts that match the whole pattern. Its syntax is that of Rust's `regex`, without look-around and
    back-references."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(_checked_nesting(_checked_size(pattern))))


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar of the given texts."""
    if not choices:
        raise GrammarError("there must be at least one choice")
    return lark_grammar("start: " + " | ".join(json.dumps(choice) for choice in choices), foreign=False)


def lark_grammar(text: str, *, foreign: bool = True) -> str:
    """A Lark grammar in llguidance's format. A `foreign` grammar comes from a client: it may be in GBNF or EBNF
    (`root ::= ...`), its nesting is checked, and its JSON schemas must be held whole."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    _checked_size(text)
    if foreign:
        _check_schemas(_checked_nesting(text))
    try:
        lark = any_to_lark(text) if foreign and "::=" in text else text
    except Exception as error:  # the converter raises plain `Exception`s
        raise GrammarError(f"the EBNF cannot be read: {error}") from error
    return str(LLMatcher.grammar_from_lark(lark))


def reasoned_grammar(answer: str | None, *, start: str, end: str, is_open: bool) -> str:
    """A grammar of free text up to `end`, and then a text of the grammar `answer`; None: any text.

    With `is_open` the text begins inside the reasoning. Otherwise it has reasoning only if it begins with `start`.
    """
    begin = "" if is_open else rf"\s{{0,8}}{_in_regex(start)}"
    rules = [
        f"start: thought{'' if is_open else '?'} SPACE {'REST' if answer is None else '@after_reasoning'}",
        rf"thought[lazy]: /{begin}(.|\n)*{_in_regex(end)}/",
        r"SPACE: /[ \n]{0,8}/",
    ]
    if answer is None:
        return lark_grammar("\n".join([*rules, r"REST: /(.|\n)*/"]), foreign=False)
    first, *others = parts_of(answer)
    whole = [{"lark_grammar": "\n".join(rules)}, {**first, "name": "after_reasoning"}, *others]
    return json.dumps({"grammars": whole})


def parts_of(grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar; the first has the start rule. A Lark text is one part."""
    try:
        return list(json.loads(grammar)["grammars"])
    except ValueError:
        return [{"lark_grammar": grammar}]


def _in_regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


class ThinkingBudget(NamedTuple):
    """The most tokens of the reasoning, which begins after the text `start` and is closed with `end`."""

    num_tokens: int
    start: str  # "": the reasoning begins with the first token
    end: str

    def added_to(self, grammar: str) -> str:
        """The grammar with the budget, in the form that the engine's matchers read."""
        return f"{_BUDGET}{json.dumps(self)}\n{grammar}"

    @classmethod
    def split(cls, grammar: str) -> tuple[ThinkingBudget | None, str]:
        """The budget of a grammar that has one, and the grammar without it."""
        if not grammar.startswith(_BUDGET):
            return None, grammar
        head, _, rest = grammar.removeprefix(_BUDGET).partition("\n")
        return cls(*json.loads(head)), rest


def _check_schemas(text: str) -> None:
    """Raises GrammarError for a schema in a Lark grammar that cannot be enforced completely."""
    if text.lstrip().startswith("{"):
        raise GrammarError("must be in Lark, GBNF or EBNF")
    for found in re.finditer(r"%json\s*", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"after `%json` there must be a JSON schema: {error}") from error
        enforceable_schema(schema, JSON_OPTIONS, strict=True)


def _checked_size(text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed")
    return text


def _checked_nesting(text: str) -> str:
    """Returns the text unchanged. Raises GrammarError if its brackets are nested too deeply, because the compiler's
    recursion could end the process."""
    depth = deepest = 0
    for mark in text:
        if mark in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in ")]}":
            depth -= 1
    if deepest > MAX_NESTING:
        raise GrammarError(f"is nested too deeply: {deepest} brackets; at most {MAX_NESTING} are allowed")
    return text
