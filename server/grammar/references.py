"""References in JSON schemas: `{"$ref": "#/$defs/node"}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from batcher.grammar import GrammarError


def moved(schema: Any, place: str) -> Any:
    """A schema for use at `place` in another one: its internal references are moved there."""
    if isinstance(schema, Mapping):
        inner = {key: moved(value, place) for key, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            inner["$ref"] = place + reference[1:]
        return inner
    return [moved(item, place) for item in schema] if isinstance(schema, list) else schema


def resolved(root: Any, reference: str) -> Any:
    """The schema in `root` that a reference `#/...` means. Raises GrammarError if there is none."""
    found = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name[:9]) < len(found):
            found = found[int(name)]
        else:
            raise GrammarError(f"the reference {reference[:100]!r} leads to no schema")
    return found


def contains_reference(schema: Any) -> bool:
    """Whether there is a reference in the schema."""
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(map(contains_reference, schema.values()))
    return isinstance(schema, list) and any(map(contains_reference, schema))
