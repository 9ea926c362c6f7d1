"""The schemas inside a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# The keywords whose values are schemas by name, lists of schemas, and schemas. Those of `items` may be a list, too.
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
           "unevaluatedProperties", "unevaluatedItems")  # fmt: skip


def all_inside(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas inside it."""
    if isinstance(schema, Mapping):
        yield schema
        for _, inner in subschemas(schema):
            yield from all_inside(inner)


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly inside a schema, with the end of their JSON pointers."""
    for name in MAPS:
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            escaped = ((key.replace("~", "~0").replace("/", "~1"), s) for key, s in inner.items())
            yield from ((f"{name}/{key}", s) for key, s in escaped if isinstance(s, Mapping))
    for name in (*LISTS, "items"):
        inner = schema.get(name)
        if isinstance(inner, list):
            yield from ((f"{name}/{i}", s) for i, s in enumerate(inner) if isinstance(s, Mapping))
    for name in (*SCHEMAS, "items"):
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            yield name, inner
