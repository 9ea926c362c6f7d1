"""Finds the place of a fault in a JSON schema. The compiler reports faults without their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_TRIES = 200  # compilations, to find the place

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
_SHARED = ("$defs", "definitions")


def place_of_fault(schema: Mapping[str, Any], fault: str, compile: Callable[[Mapping[str, Any]], str]) -> str:
    """A JSON pointer to the innermost schema that, compiled by itself, has the same fault.

    Args:
        fault: the result of `compile` for the whole schema.
        compile: the fault of a schema, "" if it has none.
    """
    pointer, here = "#", schema
    shared = {name: schema[name] for name in _SHARED if name in schema}
    tries = 0
    found: bool = True
    while found:
        found = False
        for step, inner in _subschemas(here):
            tries += 1
            if tries > MAX_TRIES:
                return pointer
            if compile({**shared, **inner}) == fault:
                pointer, here, found = f"{pointer}/{step}", inner, True
                break
    return pointer


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in _MAPS:
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            yield from ((f"{name}/{_escaped(key)}", s) for key, s in inner.items() if isinstance(s, Mapping))
    for name in _LISTS:
        inner = schema.get(name)
        if isinstance(inner, list):
            yield from ((f"{name}/{i}", s) for i, s in enumerate(inner) if isinstance(s, Mapping))
    for name in _SCHEMAS:
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            yield name, inner


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
