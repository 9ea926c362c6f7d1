"""Structural tags: free text in which a trigger begins a tag whose content is JSON by a schema, in the forms of vLLM.

    structural_tag_grammar({"type": "structural_tag", "format": {
        "type": "triggered_tags", "triggers": ["<f="],
        "tags": [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}],
    }})

The older form has `structures` (`begin`, `schema`, `end`) and `triggers`. XGrammar's other formats are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from batcher.grammar import GrammarError
from server.grammar.forms import JSON_OPTIONS, Grammar
from server.grammar.schemas import enforceable_schema

_EXPECTED = "`type` `triggered_tags`, `triggers`, and `tags` of `begin`, `end` and `content` of the type `json_schema`"


class _Tag(NamedTuple):
    place: str  # in the request
    begin: str
    schema: Any
    end: str


def structural_tag_grammar(tag: Mapping[str, Any]) -> Grammar:
    """The grammar of a structural tag in either form, and the keywords of its JSON schemas that it does not enforce.

    Raises GrammarError for another format, and for a tag that begins with no trigger, with its place.
    """
    from llguidance import StructTag

    made, unenforced = [], []
    triggers, tags = _read(tag)
    for place, begin, schema, end in tags:
        # The shortest of several triggers counts, because it is complete first.
        trigger = min((t for t in triggers if t and begin.startswith(t)), key=len, default=None)
        if trigger is None:
            raise GrammarError(f"{place}: its `begin` must start with one of the triggers")
        held = enforceable_schema(schema, JSON_OPTIONS)
        made.append(StructTag(trigger=trigger, begin=begin, grammar=f"start: {held.expression}", end=end))
        unenforced += [f"{place}: {keyword}" for keyword in held.unenforced]
    if not made:
        raise GrammarError("a structural tag needs at least one tag")
    return Grammar(StructTag.to_grammar(made, assume_special=False), tuple(unenforced))


def _read(whole: Mapping[str, Any]) -> tuple[list[str], list[_Tag]]:
    """The triggers and the tags."""
    match whole:
        case {"format": {"type": "triggered_tags", "triggers": [*triggers], "tags": [*given], **others}}:
            for name, value in others.items():
                if value is not False:
                    raise GrammarError(f"format: the field `{str(name)[:40]}` is not supported by this server")
            tags = [_of_tag(f"format.tags.{i}", each) for i, each in enumerate(given)]
        case {"format": {"type": str(kind)}} if kind != "triggered_tags":
            raise GrammarError(
                f"format: the format `{kind[:40]}` is not supported by this server; it takes {_EXPECTED}"
            )
        case {"structures": [*given], "triggers": [*triggers]}:
            tags = [_of_structure(f"structures.{i}", each) for i, each in enumerate(given)]
        case _:
            raise GrammarError(f"a structural tag needs a `format` ({_EXPECTED}), or `structures` and `triggers`")
    return [trigger for trigger in triggers if isinstance(trigger, str)], tags


def _of_structure(place: str, structure: Any) -> _Tag:
    match structure:
        case {"begin": str(begin), "end": str(end), **others}:
            return _Tag(place, begin, others.get("schema", {}), end)
    raise GrammarError(f"{place}: a structure needs a `begin`, a `schema` and an `end`")


def _of_tag(place: str, tag: Any) -> _Tag:
    match tag:
        case {"begin": str(begin), "content": {"type": "json_schema", "json_schema": schema, **how}, "end": str(end)}:
            if tag.keys() <= {"type", "begin", "content", "end"} and how in ({}, {"style": "json"}):
                return _Tag(place, begin, schema, end)
    raise GrammarError(f"{place}: is not supported by this server; it takes {_EXPECTED}")
