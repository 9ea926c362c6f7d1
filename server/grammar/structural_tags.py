"""Structural tags: free text in which a trigger begins a tag whose content is JSON by a schema, in the forms of vLLM.

    structural_tag_grammar({"type": "structural_tag", "format": {
        "type": "triggered_tags", "triggers": ["<f="],
        "tags": [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}],
    }})

The older form has `structures` (`begin`, `schema`, `end`) and `triggers`. XGrammar's other formats are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batcher.grammar import GrammarError
from server.grammar.forms import JSON_OPTIONS, Grammar
from server.grammar.schemas import enforceable_schema

_EXPECTED = "`type` `triggered_tags`, `triggers`, and `tags` of `begin`, `end` and `content` of the type `json_schema`"


def structural_tag_grammar(tag: Mapping[str, Any]) -> Grammar:
    """The grammar of a structural tag in either form, and the keywords of its JSON schemas that it does not enforce.

    Raises GrammarError for another format, and for a tag that begins with no trigger, with its place.
    """
    from llguidance import StructTag

    tags, unenforced = [], []
    triggers, read = _read(tag)
    for place, begin, schema, end in read:
        # The shortest of several triggers counts, because it is complete first.
        trigger = min((t for t in triggers if t and begin.startswith(t)), key=len, default=None)
        if trigger is None:
            raise GrammarError(f"{place}: its `begin` must start with one of the triggers")
        held = enforceable_schema(schema, JSON_OPTIONS)
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=f"start: {held.expression}", end=end))
        unenforced += [f"{place}: {keyword}" for keyword in held.unenforced]
    if not tags:
        raise GrammarError("a structural tag needs at least one tag")
    return Grammar(StructTag.to_grammar(tags, assume_special=False), tuple(unenforced))


def _read(whole: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, str, Any, str]]]:
    """The triggers, and of each tag its place, its begin, its schema and its end."""
    match whole:
        case {"format": {"type": "triggered_tags", "triggers": [*triggers], "tags": [*given], **others}}:
            place, read = "format.tags", _of_tag
            refused = [name for name, value in others.items() if value is not False]
        case {"format": {"type": str(kind)}} if kind != "triggered_tags":
            raise GrammarError(
                f"format: the format `{kind[:40]}` is not supported by this server; it takes {_EXPECTED}"
            )
        case {"structures": [*given], "triggers": [*triggers]}:
            place, read, refused = "structures", _of_structure, []
        case _:
            raise GrammarError(f"a structural tag needs a `format` ({_EXPECTED}), or `structures` and `triggers`")
    if refused:
        raise GrammarError(f"format: the field `{refused[0][:40]}` is not supported by this server")
    tags = [(f"{place}.{i}", *read(f"{place}.{i}", each)) for i, each in enumerate(given)]
    return [trigger for trigger in triggers if isinstance(trigger, str)], tags


def _of_structure(place: str, structure: Any) -> tuple[str, Any, str]:
    match structure:
        case {"begin": str(begin), "end": str(end), **others}:
            return begin, others.get("schema", {}), end
    raise GrammarError(f"{place}: a structure needs a `begin`, a `schema` and an `end`")


def _of_tag(place: str, tag: Any) -> tuple[str, Any, str]:
    match tag:
        case {"begin": str(begin), "content": {"type": "json_schema", "json_schema": schema, **how}, "end": str(end)}:
            if tag.keys() <= {"type", "begin", "content", "end"} and how in ({}, {"style": "json"}):
                return begin, schema, end
    raise GrammarError(f"{place}: is not supported by this server; it takes {_EXPECTED}")
