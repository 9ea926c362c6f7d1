"""JSON schemas as people write them, in the keywords that a grammar can hold.

    held = held_schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    held.schema      # {"type": "array", "items": {"type": "integer"}}
    held.unenforced  # ("uniqueItems (at #)",)

The compiler of grammars refuses a keyword that it does not know. Such a keyword has one of three fates:

- Other keywords say the same. `propertyNames` becomes `patternProperties`, `dependentRequired` becomes `anyOf`, and so
  on. The table `_REWRITTEN` has all of them.
- It is an annotation, as most values of `format` are: JSON Schema lets a validator ignore them.
- Nothing says the same, as with `uniqueItems`. It is left out, and `unenforced` has its name and place. The grammar
  then allows more than the schema does.

A schema keeps its places: a reference such as `#/properties/a` means the same as before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from batcher.grammar import GrammarError
from server.grammar.references import resolved

# What the compiler enforces. Another `format` is an annotation.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_SAME_FORMATS = {f"uuid{version}": "uuid" for version in range(1, 9)}  # pydantic's names
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
           "unevaluatedProperties", "unevaluatedItems")  # fmt: skip
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "$dynamicRef", "$recursiveRef")
_TYPES = ("null", "boolean", "number", "string", "array", "object")  # `integer` is a kind of `number`
# Look-around and back-references. The backslashes before it are pairs.
_UNKNOWN_TO_ENGINE = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\(?:[1-9]|k<))")
MAX_PLACE_CHARS = 200
MAX_CONDITIONS = 4  # of `dependentRequired`: each doubles the alternatives that the compiler distinguishes

Schema = dict[str, Any]


class HeldSchema(NamedTuple):
    """A schema that the compiler takes.

    `unenforced` has the keywords that were left out and are not annotations, each with a JSON pointer to its schema.
    """

    schema: Any
    unenforced: tuple[str, ...]


def held_schema(schema: Any, *, strict: bool = False) -> HeldSchema:
    """The part of `schema` that a grammar can hold.

    `strict` asks for the whole schema: GrammarError names the first keyword that would be left out.
    """
    reader = _Reader(schema)
    try:
        held = HeldSchema(reader.read(schema, "#"), tuple(reader.unenforced))
    except RecursionError as error:
        raise GrammarError("the schema is nested too deeply") from error
    if strict and held.unenforced:
        raise GrammarError(
            f"a grammar cannot hold the keyword {held.unenforced[0]}; leave it out, or do without `strict`"
        )
    return held


class _Reader:
    def __init__(self, root: Any) -> None:
        self._root = root
        self.unenforced: list[str] = []

    def read(self, schema: Any, place: str) -> Any:
        """The schema at `place`, with all schemas inside it, as the compiler takes it."""
        if not isinstance(schema, Mapping) or _is_malformed(schema):
            return schema
        here: Schema = dict(schema)
        for name, holds in _REWRITTEN.items():
            if name in schema and not holds(self, here):
                self.unenforced.append(f"{name} (at {place})"[:MAX_PLACE_CHARS])
        here = {name: value for name, value in here.items() if name in _KEPT or name not in _REWRITTEN}
        for name, value in here.items():
            if name in _MAPS:
                here[name] = {key: self.read(inner, f"{place}/{name}/{_escaped(key)}") for key, inner in value.items()}
            elif (name in _LISTS or name == "items") and isinstance(value, list):
                here[name] = [self.read(inner, f"{place}/{name}/{i}") for i, inner in enumerate(value)]
            elif name in _SCHEMAS or name == "items":
                here[name] = self.read(value, f"{place}/{name}")
        return here

    def target(self, schema: Any) -> Any:
        """The schema, or the one that it only refers to. None: one of its keywords has a value of the wrong kind."""
        for _ in range(8):
            if not (isinstance(schema, Mapping) and schema.keys() == {"$ref"} and str(schema["$ref"]).startswith("#")):
                break
            schema = resolved(self._root, schema["$ref"])
        return None if isinstance(schema, Mapping) and _is_malformed(schema) else schema


def _is_malformed(schema: Mapping[str, Any]) -> bool:
    """Whether a keyword has a value of the wrong kind, which the compiler refuses by name."""
    types = schema.get("type", "")
    return (
        any(name in schema and not isinstance(schema[name], Mapping) for name in _MAPS)
        or any(name in schema and not isinstance(schema[name], list) for name in (*_LISTS, "enum"))
        or not all(isinstance(name, str) for name in ([types] if not isinstance(types, list) else types))
    )


def _format(_: _Reader, here: Schema) -> bool:
    name = here["format"]
    if isinstance(name, str):
        here["format"] = _SAME_FORMATS.get(name, name)
        if here["format"] not in FORMATS:
            del here["format"]
    return True


def _pattern(_: _Reader, here: Schema) -> bool:
    if not isinstance(here["pattern"], str) or _is_regex(here["pattern"]):
        return True
    del here["pattern"]
    return False


def _pattern_properties(_: _Reader, here: Schema) -> bool:
    """Names that fit a pattern which cannot be compiled may have any value."""
    patterns = here["patternProperties"]
    known = {pattern: inner for pattern, inner in patterns.items() if _is_regex(pattern)}
    if len(known) == len(patterns):
        return True
    here["patternProperties"] = known
    here.pop("additionalProperties", None)
    return False


def _unique_items(_: _Reader, here: Schema) -> bool:
    most = here.get("maxItems")
    return not here["uniqueItems"] or (isinstance(most, int) and most <= 1)


def _not(reader: _Reader, here: Schema) -> bool:
    """Held: `not` of types, of values of an `enum`, and of a property that is there."""
    refused = reader.target(here["not"])
    if refused is False:
        return True
    if not isinstance(refused, Mapping) or len(refused) != 1:
        return False
    ((name, value),) = refused.items()
    if name == "type" and isinstance(value, str | list):
        return _without_types(here, value)
    if name in ("enum", "const") and isinstance(here.get("enum"), list):
        values = {json.dumps(each, sort_keys=True) for each in (value if name == "enum" else [value])}
        here["enum"] = [each for each in here["enum"] if json.dumps(each, sort_keys=True) not in values]
        return True
    is_single = name == "required" and isinstance(value, list) and len(value) == 1 and here.get("type") == "object"
    if is_single and value[0] not in _required(here):
        here["properties"] = {**here.get("properties", {}), value[0]: False}
        return True
    return False


def _without_types(here: Schema, value: str | list[Any]) -> bool:
    refused = {value} if isinstance(value, str) else {name for name in value if isinstance(name, str)}
    given = here.get("type", list(_TYPES))
    given = [given] if isinstance(given, str) else given
    if "integer" in refused and "number" in given and "number" not in refused:
        return False  # numbers that are no integers: no type says so
    if "number" in refused:
        refused.add("integer")
    here["type"] = [name for name in given if name not in refused]
    return True


def _if(reader: _Reader, here: Schema) -> bool:
    """Held: a condition on one required property, whose possible values are listed."""
    condition, listed = reader.target(here["if"]), here.get("properties")
    if not (isinstance(condition, Mapping) and condition.keys() <= {"type", "properties", "required"}):
        return False
    conditions = condition.get("properties")
    if not (isinstance(conditions, Mapping) and len(conditions) == 1 and isinstance(listed, Mapping)):
        return False
    ((name, inner),) = conditions.items()
    values, held = _values_of(reader.target(listed.get(name))), _values_of(reader.target(inner))
    others = condition.get("required", [])
    if values is None or held is None or name not in _required(here) or not set(others) <= {name}:
        return False
    rest = [value for value in values if value not in held]
    branches = [
        {"allOf": [{"properties": {name: {"enum": chosen}}}, here.get(branch, {})]}
        for branch, chosen in (("then", held), ("else", rest))
        if chosen
    ]
    here["allOf"] = [*here.get("allOf", ()), {"anyOf": branches}]
    return True


def _property_names(reader: _Reader, here: Schema) -> bool:
    """Held: names by a pattern or from a list, where no other keyword names properties."""
    names = reader.target(here["propertyNames"])
    if names is True or (isinstance(names, Mapping) and not (names.keys() - {"type", "title", "description"})):
        return True
    if here.get("properties") or "patternProperties" in here or not isinstance(names, Mapping):
        return False
    value = here.get("additionalProperties", {})
    listed = _values_of(names)
    if listed is not None:
        here["properties"] = {name: value for name in listed if isinstance(name, str)}
    elif isinstance(names.get("pattern"), str) and not names.keys() - {"type", "pattern", "title", "description"}:
        here["patternProperties"] = {names["pattern"]: value}
        if not _is_regex(names["pattern"]):
            return False
    else:
        return False
    here["additionalProperties"] = False
    return True


def _dependent(name: str) -> Callable[[_Reader, Schema], bool]:
    """Either the property is not there, or all that it needs are."""

    def holds(_: _Reader, here: Schema) -> bool:
        needs = here[name]
        if not (isinstance(needs, Mapping) and all(isinstance(names, list) for names in needs.values())):
            return False
        if len(needs) > MAX_CONDITIONS or here.get("type") != "object":
            return False
        either = [
            {"anyOf": [{"properties": {key: False}}, {"required": [key, *names]}]} for key, names in needs.items()
        ]
        here["allOf"] = [*here.get("allOf", ()), *either]
        return True

    return holds


def _unevaluated(name: str, other: str) -> Callable[[_Reader, Schema], bool]:
    """Where a schema combines no others, what is unevaluated is what `other` speaks of."""

    def holds(_: _Reader, here: Schema) -> bool:
        if here[name] is True:
            return True
        if any(key in here for key in _COMBINING):
            return False
        here.setdefault(other, here[name])
        return True

    return holds


def _one_of(reader: _Reader, here: Schema) -> bool:
    """The compiler reads `oneOf` as `anyOf`, which is the same if no value fits two of the schemas."""
    return _are_disjoint([reader.target(branch) for branch in here["oneOf"]], reader)


def _are_disjoint(branches: list[Any], reader: _Reader) -> bool:
    """Whether the schemas differ by their type, by their value, or by the value of a required property."""
    if not all(isinstance(branch, Mapping) for branch in branches):
        return False
    kinds = ["number" if branch.get("type") == "integer" else branch.get("type") for branch in branches]
    if all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds):
        return True
    if _differ([_values_of(branch) for branch in branches]):
        return True
    if kinds != ["object"] * len(kinds):
        return False
    shared = set.intersection(*(set(_required(branch)) for branch in branches))
    return any(
        _differ([_values_of(reader.target(branch.get("properties", {}).get(name))) for branch in branches])
        for name in shared
    )


def _differ(lists: list[list[Any] | None]) -> bool:
    if any(values is None for values in lists):
        return False
    texts = [{json.dumps(value, sort_keys=True) for value in values or ()} for values in lists]
    return len(set().union(*texts)) == sum(map(len, texts))


def _values_of(schema: Any) -> list[Any] | None:
    """The values that `const` or `enum` lists; None: there is neither."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _required(schema: Mapping[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _annotation(_: _Reader, here: Schema) -> bool:
    return True


def _unheld(_: _Reader, here: Schema) -> bool:
    return False


def _is_regex(pattern: str) -> bool:
    """Whether the compiler's engine of regular expressions has all that the pattern uses."""
    return not _UNKNOWN_TO_ENGINE.search(pattern)


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly inside a schema, with the end of their JSON pointers."""
    for name in _MAPS:
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            yield from ((f"{name}/{_escaped(key)}", s) for key, s in inner.items() if isinstance(s, Mapping))
    for name in (*_LISTS, "items"):
        inner = schema.get(name)
        if isinstance(inner, list):
            yield from ((f"{name}/{i}", s) for i, s in enumerate(inner) if isinstance(s, Mapping))
    for name in (*_SCHEMAS, "items"):
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            yield name, inner


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


# Each changes the schema `here`, and returns whether the keyword's meaning is held. Only those of `_KEPT` stay.
_REWRITTEN: dict[str, Callable[[_Reader, Schema], bool]] = {
    "format": _format,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "oneOf": _one_of,
    "uniqueItems": _unique_items,
    "not": _not,
    "if": _if,
    "then": _annotation,  # without `if` it means nothing, and with it, it is read there
    "else": _annotation,
    "propertyNames": _property_names,
    "dependentRequired": _dependent("dependentRequired"),
    "dependencies": _dependent("dependencies"),  # the older name
    "unevaluatedProperties": _unevaluated("unevaluatedProperties", "additionalProperties"),
    "unevaluatedItems": _unevaluated("unevaluatedItems", "items"),
    "contains": _unheld,
    "minContains": _annotation,
    "maxContains": _annotation,
    "dependentSchemas": _unheld,
    "$dynamicAnchor": _annotation,
    "$dynamicRef": _unheld,
    "$recursiveAnchor": _annotation,
    "$recursiveRef": _unheld,
}
_KEPT = frozenset(("format", "pattern", "patternProperties", "oneOf"))
