"""Lark rules for JSON by a schema whose constants are numbers that the compiler of schemas does not write.

The compiler reads every number as a double, so 2**53 + 1 would become 2**53. Here the constants of `const`
and `enum` are literal texts, and rules write the JSON on the way to them: objects, arrays, choices and references. The
compiler reads all other schemas inside. An object has the listed properties only, in their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

# The keywords whose values are schemas by name, lists of schemas, and schemas. Those of `items` may be a list, too.
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
           "unevaluatedProperties", "unevaluatedItems")  # fmt: skip
LEAST_EXPONENT = -22  # of ten, that a double holds
MAX_REPEATS = 1000  # of a list's items, as rules
_ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $schema $id $defs definitions".split()
)
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
_OF_LISTS = frozenset({"type", "items", "minItems", "maxItems"})
_LOCAL = re.compile(r"#/(\$defs|definitions)/([^/%~]+)")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


class NoLiteralFormError(Exception):
    """A constant stands where no rule is made for the schemas around it."""


def is_exact(number: float) -> bool:
    """Whether the compiler writes exactly this number. It reads the digits and the power of ten as two doubles, so it
    misreads some numbers of more than 15 digits."""
    _, digits, exponent = Decimal(str(number)).as_tuple()
    is_short = int("".join(map(str, digits))) <= 2**53 and int(exponent) >= LEAST_EXPONENT
    return is_short and abs(number) <= 2**53


def has_long_constant(schema: Any) -> bool:
    """Whether a `const` or an `enum` of the schema, or of one inside it, has a number that is not exact."""
    values = (each.get(name) for each in all_inside(schema) for name in ("const", "enum"))
    return not all(is_exact(number) for value in values for number in _numbers(value))


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


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(inner)


class LiteralRules:
    """`expression` stands for a JSON text that is valid by the schema; `lines` has the rules that it needs.

    Raises NoLiteralFormError.
    """

    def __init__(self, schema: Mapping[str, Any], options: Mapping[str, Any], prefix: str) -> None:
        self._options = options
        self._prefix = prefix
        self._shared = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}
        self._rules: dict[str, str] = {}  # of schemas that are referred to
        shared = {name: inner for name, inner in self._shared.items() if name != "$schema"}
        self._refers_to_long = has_long_constant(shared)
        for inner in all_inside(schema):
            is_local = _LOCAL.fullmatch(str(inner.get("$ref", "#/$defs/any")))
            if not is_local or (inner is not schema and "$id" in inner) or "$dynamicRef" in inner:
                raise NoLiteralFormError
        self._white = f"{prefix.upper()}_WHITE"
        self.lines = [f"{self._white}: /{options['whitespace_pattern']}/"]
        self.expression = self._value(schema)

    def _value(self, schema: Any) -> str:
        if schema is False:
            raise NoLiteralFormError
        if schema is True or not self._is_long(schema):
            return self._json({} if schema is True else schema)
        given = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
        kind = given.get("type")
        match given:
            case {"$ref": str(reference)} if len(given) == 1:
                return self._reference(reference)
            case {"anyOf": [_, *_] as options} if len(given) == 1:
                return "(" + " | ".join(map(self._value, options)) + ")"
            case {"const": value} if given.keys() <= {"const", "type"}:
                return _choices([value], kind)
            case {"enum": [*values]} if given.keys() <= {"enum", "type"}:
                return _choices(values, kind)
            case {"type": "array"} if given.keys() <= _OF_LISTS:
                return self._list(given)
            case {"type": "object", "properties": Mapping()} if given.keys() <= _OF_OBJECTS:
                return self._object(given["properties"], given.get("required", []))
        raise NoLiteralFormError

    def _is_long(self, schema: Any) -> bool:
        refers = self._refers_to_long and any("$ref" in inner for inner in all_inside(schema))
        return refers or has_long_constant({name: each for name, each in schema.items() if name not in self._shared})

    def _json(self, schema: Mapping[str, Any]) -> str:
        refers = any("$ref" in inner for inner in all_inside(schema))
        shared = self._shared if refers else {"$schema": self._shared["$schema"]} if "$schema" in self._shared else {}
        return "%json " + json.dumps({**shared, **schema, "x-guidance": self._options})

    def _reference(self, reference: str) -> str:
        found = _LOCAL.fullmatch(reference)
        target = self._shared.get(found[1], {}).get(found[2]) if found else None
        if target is None:
            raise NoLiteralFormError
        if reference not in self._rules:
            self._rules[reference] = name = f"{self._prefix}_ref_{len(self._rules)}"
            self.lines.append(f"{name}: {self._value(target)}")
        return self._rules[reference]

    def _list(self, given: Mapping[str, Any]) -> str:
        least, most = given.get("minItems", 0), given.get("maxItems", MAX_REPEATS)
        if not (isinstance(least, int) and isinstance(most, int) and 0 <= least <= most <= MAX_REPEATS):
            raise NoLiteralFormError
        item = self._new(self._value(given.get("items", True)))
        last = "" if "maxItems" not in given else max(most - 1, 0)
        items = f"{item} ({self._marked(',')} {item}){{{max(least - 1, 0)},{last}}}" if most else ""
        return f'"[" {self._white} {items if least else f"({items})?" if items else ""} {self._white} "]"'

    def _object(self, properties: Mapping[str, Any], required: Any) -> str:
        if not isinstance(required, list) or not all(name in properties for name in required):
            raise NoLiteralFormError
        rest = first = ""  # the rules of the members from one on: after another member, and as the first
        for name, schema in reversed([*properties.items()]):
            member = f"{_literal(name)} {self._marked(':')} {self._new(self._value(schema))} {rest}"
            rest, first = (
                self._new(whole if name in required else f"{whole} | {without}" if without else f"({whole})?")
                for whole, without in ((f"{self._marked(',')} {member}", rest), (member, first))
            )
        return f'"{{" {self._white} {first} {self._white} "}}"'

    def _marked(self, mark: str) -> str:
        return f'{self._white} "{mark}" {self._white}'

    def _new(self, expression: str) -> str:
        name = f"{self._prefix}_{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name


def _choices(values: list[Any], kind: Any) -> str:
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else [*_KINDS]
    valid = [value for value in values if any(_is_of(value, each) for each in kinds)]
    if not valid:
        raise NoLiteralFormError
    return "(" + " | ".join(map(_literal, valid)) + ")"


def _is_of(value: Any, kind: Any) -> bool:
    return isinstance(value, _KINDS.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


def _literal(value: Any) -> str:
    return json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)
