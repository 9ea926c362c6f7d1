"""The schemas inside a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# The keywords whose values are schemas by name, lists of schemas, and schemas. Those of `items` may be a list, too.
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
           "unevaluatedProperties", "unevaluatedItems")  # fmt: skip


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly inside a schema, with the end of their JSON pointers."""
    for name in MAPS:
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            yield from ((f"{name}/{_escaped(key)}", s) for key, s in inner.items() if isinstance(s, Mapping))
    for name in (*LISTS, "items"):
        inner = schema.get(name)
        if isinstance(inner, list):
            yield from ((f"{name}/{i}", s) for i, s in enumerate(inner) if isinstance(s, Mapping))
    for name in (*SCHEMAS, "items"):
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            yield name, inner


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
