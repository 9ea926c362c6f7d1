"""Whether two JSON schemas have no value in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

MAX_COMPARED = 10_000  # schemas and values, in all comparisons
MAX_DEPTH = 4
_KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array",
          dict: "object"}  # fmt: skip
_FEW_VALUES: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}


class Comparison:
    """Compares schemas of one root. `target` gives the schema to which one refers."""

    def __init__(self, target: Callable[[Any], Any]) -> None:
        self._target = target
        self._num_compared = 0

    def are_apart(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether it is certain that no value fits both: their types or values differ, a property that both require is
        apart, or one requires a property that the other does not allow."""
        a, b = self._target(a), self._target(b)
        if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
            return a is False or b is False
        values = values_of(a), values_of(b)
        self._num_compared += 1 + len(values[0] or ()) + len(values[1] or ())
        if depth > MAX_DEPTH or self._num_compared > MAX_COMPARED:
            return False
        if values[0] is not None and values[1] is not None:
            return {_as_key(value) for value in values[0]}.isdisjoint(map(_as_key, values[1]))
        kinds = _kinds_of(a), _kinds_of(b)
        if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
            return True
        if kinds != ({"object"}, {"object"}):
            return False
        names = set(required_of(a)), set(required_of(b))
        listed = a.get("properties", {}), b.get("properties", {})
        both = names[0] & names[1] & listed[0].keys() & listed[1].keys()
        if any(self.are_apart(listed[0][name], listed[1][name], depth + 1) for name in both):
            return True
        return not all(_may_have(b, name) for name in names[0]) or not all(_may_have(a, name) for name in names[1])


def values_of(schema: Any) -> list[Any] | None:
    """All values of a schema, if it lists them; None: it does not."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return _FEW_VALUES.get(schema["type"]) if isinstance(schema.get("type"), str) else None


def required_of(schema: Mapping[str, Any]) -> list[str]:
    """The properties that a schema requires."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _may_have(schema: Mapping[str, Any], name: str) -> bool:
    listed = schema.get("properties", {})
    if name in listed:
        return listed[name] is not False
    return schema.get("additionalProperties") is not False or "patternProperties" in schema


def _as_key(value: Any) -> Any:
    """Equal for values that JSON Schema holds to be equal: 1 is 1.0, and not true."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else (_KINDS[type(value)], value)


def _kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types of a schema's values; empty: they are not known. Integers are numbers."""
    values = values_of(schema)
    if values is not None:
        return {_KINDS[type(value)] for value in values}
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    return {"number" if name == "integer" else name for name in types}
