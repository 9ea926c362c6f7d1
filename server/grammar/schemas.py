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
from itertools import combinations
from typing import Any, NamedTuple

from batcher.grammar import GrammarError
from server.grammar.disjoint import Comparison, required_of, values_of
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
_CHOOSING = ("anyOf", "oneOf", "if", "not", "dependentSchemas", "$dynamicRef", "$recursiveRef")
_TYPES = ("null", "boolean", "number", "string", "array", "object")  # `integer` is a kind of `number`
# Look-around and back-references. The backslashes before it are pairs.
_UNKNOWN_TO_ENGINE = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\(?:[1-9]|k<))")
MAX_PLACE_CHARS = 200
MAX_CONDITIONS = 3  # of one schema: each doubles the alternatives that the compiler distinguishes
MAX_ALTERNATIVES = 8  # that stand for one keyword
MAX_BRANCHES = 100  # of a `oneOf` of which each two are compared

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
        self.comparison = Comparison(self.target)
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
        if "additionalProperties" in schema and "additionalProperties" not in here:
            self.unenforced.append(f"additionalProperties (at {place})"[:MAX_PLACE_CHARS])
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
    if name == "required" and isinstance(value, list) and here.get("type") == "object":
        free = [each for each in value if each not in required_of(here)]
        if not free or len(free) > MAX_ALTERNATIVES:
            return False
        _add_any_of(here, [_absent(each) for each in free])
        return True
    return False


def _absent(*names: str) -> Schema:
    """Objects without these properties."""
    return {"properties": dict.fromkeys(names, False)}


def _add_any_of(here: Schema, branches: list[Any]) -> None:
    here["allOf"] = [*here.get("allOf", ()), {"anyOf": branches}]


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
    """Held: a condition on one required property whose possible values are listed, or on the presence of one."""
    condition, listed = reader.target(here["if"]), here.get("properties", {})
    if not (isinstance(condition, Mapping) and condition.keys() <= {"type", "properties", "required"}):
        return False
    conditions, others = condition.get("properties", {}), required_of(condition)
    if not (isinstance(conditions, Mapping) and isinstance(listed, Mapping)):
        return False
    then, otherwise = here.get("then", {}), here.get("else", {})
    if not conditions and len(others) == 1 and here.get("type") == "object":
        _add_any_of(here, [{"allOf": [{"required": others}, then]}, {"allOf": [_absent(*others), otherwise]}])
        return True
    if len(conditions) != 1:
        return False
    ((name, inner),) = conditions.items()
    values, held = values_of(reader.target(listed.get(name))), values_of(reader.target(inner))
    if values is None or held is None or name not in required_of(here) or not set(others) <= {name}:
        return False
    rest = [value for value in values if value not in held]
    branches = [
        {"allOf": [{"properties": {name: {"enum": chosen}}}, branch]}
        for branch, chosen in ((then, held), (otherwise, rest))
        if chosen
    ]
    _add_any_of(here, branches)
    return True


def _all_of(reader: _Reader, here: Schema) -> bool:
    """Conditions in `allOf` are read with the properties of the schema around them."""
    around = {name: here[name] for name in ("type", "properties", "required") if name in here}
    members, num_held = [], 0
    for member in here["allOf"]:
        if isinstance(member, Mapping) and "if" in member and member.keys() <= {"if", "then", "else"}:
            inner = {**around, **member}
            if num_held < MAX_CONDITIONS and _if(reader, inner):
                (member,) = inner["allOf"]
                num_held += 1
        members.append(member)
    here["allOf"] = members
    return True


def _property_names(reader: _Reader, here: Schema) -> bool:
    """Held: names by a pattern or from a list, where no other keyword names properties."""
    names = reader.target(here["propertyNames"])
    if names is True or (isinstance(names, Mapping) and not (names.keys() - {"type", "title", "description"})):
        return True
    if here.get("properties") or "patternProperties" in here or not isinstance(names, Mapping):
        return False
    value = here.get("additionalProperties", {})
    listed = values_of(names)
    if listed is not None:
        here["properties"] = {name: value for name in listed if isinstance(name, str)}
    elif (pattern := _pattern_of_names(names)) is not None:
        here["patternProperties"] = {pattern: value}
    else:
        return False
    here["additionalProperties"] = False
    return True


def _pattern_of_names(names: Mapping[str, Any]) -> str | None:
    """None: no pattern says the same."""
    kept = names.keys() - {"type", "title", "description"}
    if kept == {"pattern"}:
        pattern = names["pattern"]
        return pattern if isinstance(pattern, str) and _is_regex(pattern) else None
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if kept <= {"minLength", "maxLength"} and isinstance(least, int) and (most == "" or isinstance(most, int)):
        return f"^(.|\\n){{{least},{most}}}$"
    return None


def _num_properties(name: str) -> Callable[[_Reader, Schema], bool]:
    """The compiler counts properties only if all that are listed are required. Held apart from this: what follows from
    the other keywords, and one more than those that are required."""

    def holds(_: _Reader, here: Schema) -> bool:
        listed, count, required = here.get("properties", {}), here[name], set(required_of(here))
        optional = [each for each in listed if each not in required] if isinstance(listed, Mapping) else []
        if not optional or not isinstance(count, int):
            return True
        del here[name]
        is_closed = here.get("additionalProperties") is False and not here.get("patternProperties")
        if name == "minProperties":
            if count == len(required) + 1 and is_closed and len(optional) <= MAX_ALTERNATIVES:
                _add_any_of(here, [{"required": [each]} for each in optional])
                return True
            return count <= len(required)
        if count == len(required) and required <= listed.keys():
            here["properties"] = {**listed, **dict.fromkeys(optional, False)}
            here["additionalProperties"] = False
            here.pop("patternProperties", None)
            return True
        return is_closed and count >= len(required | listed.keys())

    return holds


def _dependent(name: str) -> Callable[[_Reader, Schema], bool]:
    """Either the property is not there, or all that it needs is."""

    def holds(_: _Reader, here: Schema) -> bool:
        needs = here[name]
        if not (isinstance(needs, Mapping) and all(isinstance(need, list | Mapping) for need in needs.values())):
            return False
        if len(needs) > MAX_CONDITIONS or here.get("type") != "object":
            return False
        for key, need in needs.items():
            needed = {"required": need} if isinstance(need, list) else need
            _add_any_of(here, [_absent(key), {"allOf": [{"required": [key]}, needed]}])
        return True

    return holds


def _unevaluated_properties(reader: _Reader, here: Schema) -> bool:
    """What is unevaluated is what `additionalProperties` speaks of, if the schemas that this one combines only list
    properties."""
    if here["unevaluatedProperties"] is True or "additionalProperties" in here:
        return True
    combined = [*here.get("allOf", ()), *([{"$ref": here["$ref"]}] if "$ref" in here else [])]
    names = [_listed_names(reader.target(schema)) for schema in combined]
    if any(each is None for each in names) or any(key in here for key in _CHOOSING):
        return False
    others = {name: True for each in names for name in each or ()}
    if others or "properties" in here:
        here["properties"] = {**others, **here.get("properties", {})}
    here["additionalProperties"] = here["unevaluatedProperties"]
    return True


def _listed_names(schema: Any) -> list[str] | None:
    """The properties of a schema that says nothing of others; None: it does."""
    if not isinstance(schema, Mapping) or schema.keys() - {"type", "properties", "required", "title", "description"}:
        return None
    return list(schema.get("properties", {}))


def _unevaluated_items(_: _Reader, here: Schema) -> bool:
    """Where a schema combines no others, what is unevaluated is what `items` speaks of."""
    if here["unevaluatedItems"] is True:
        return True
    if any(key in here for key in ("$ref", "allOf", *_CHOOSING)):
        return False
    here.setdefault("items", here["unevaluatedItems"])
    return True


def _one_of(reader: _Reader, here: Schema) -> bool:
    """The compiler reads `oneOf` as `anyOf`, which is the same if no value fits two of the schemas."""
    branches = [reader.target(branch) for branch in here["oneOf"]]
    if all(isinstance(branch, Mapping) and branch.keys() == {"required"} for branch in branches):
        return _one_of_required(here, branches)
    return len(branches) <= MAX_BRANCHES and all(
        reader.comparison.are_apart(a, b) for a, b in combinations(branches, 2)
    )


def _one_of_required(here: Schema, branches: list[Any]) -> bool:
    """Exactly one of some properties is there."""
    names = [name for branch in branches for name in required_of(branch)]
    free = len(set(names) - set(required_of(here))) == len(branches) == len(names)
    if not free or len(names) > MAX_ALTERNATIVES:
        return False
    del here["oneOf"]
    _add_any_of(here, [{"required": [name], **_absent(*(set(names) - {name}))} for name in names])
    return True


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
    "unevaluatedProperties": _unevaluated_properties,  # before others add to what is combined
    "unevaluatedItems": _unevaluated_items,
    "allOf": _all_of,
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
    "minProperties": _num_properties("minProperties"),
    "maxProperties": _num_properties("maxProperties"),
    "contains": _unheld,
    "minContains": _annotation,
    "maxContains": _annotation,
    "dependentSchemas": _dependent("dependentSchemas"),
    "$dynamicAnchor": _annotation,
    "$dynamicRef": _unheld,
    "$recursiveAnchor": _annotation,
    "$recursiveRef": _unheld,
}
_KEPT = frozenset(("format", "pattern", "patternProperties", "oneOf", "allOf", "minProperties", "maxProperties"))
