"""Converts JSON schemas to expressions of a Lark grammar.

    held = enforceable_schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, JSON_OPTIONS)
    held.expression  # '%json {"type": "array", ...}'
    held.unenforced  # ("uniqueItems",)

The compiler of grammars ignores a keyword that it does not know, and warns of it. It fails on patterns with
look-around, and reads numbers as doubles. What it would misread is taken out before. `unenforced` has the names of
all keywords that are ignored or taken out: the grammar then allows more than the schema does. Annotations do not count,
as most values of `format` are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from batcher.grammar import GrammarError
from server.grammar.compiler import MAX_MESSAGE_CHARS, Vocabulary, compile_grammar

MAX_GRAMMAR_CHARS = 2**16  # two seconds to compile, at worst: 6,000 optional properties
MAX_TRIES = 200  # compilations, to find the place of a fault
# Of `multipleOf`, as a whole number. The compiler makes as many states, and where several apply, their product has 32
# bits.
MAX_MULTIPLE, MAX_OF_SEVERAL = 1_000_000, 1_000
LEAST_EXPONENT = -22  # of ten, that a double holds
MAX_BOUND = 10**18  # the compiler's ranges are of 64 bits, and have all numbers of as many digits
# What the compiler enforces. Another `format` is an annotation.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_SAME_FORMATS = {f"uuid{version}": "uuid" for version in range(1, 9)}  # pydantic's names
# The keywords whose values are schemas by name, lists of schemas, and schemas. Those of `items` may be a list, too.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
            "unevaluatedProperties", "unevaluatedItems")  # fmt: skip
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ALL_VALID = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True, "propertyNames": True}
# Where none of these is, what is unevaluated is what the other keyword speaks of.
_UNEVALUATED = (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items"))
_EVALUATING = frozenset(("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "contains",
                        "dependentSchemas"))  # fmt: skip
# The compiler warns of these, too. `then` and `contains` and their like mean nothing without the keyword that is named.
_NO_LOSS = frozenset(("then", "else", "minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor"))
# Look-around and back-references. The backslashes before it are pairs.
_UNKNOWN_TO_ENGINE = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\(?:[1-9]|k<))")

Schema = dict[str, Any]


class EnforceableSchema(NamedTuple):
    """The expression for a schema in a Lark grammar, and the keywords that it does not enforce."""

    expression: str
    unenforced: tuple[str, ...]


def enforceable_schema(schema: Any, options: Mapping[str, Any], *, strict: bool = False) -> EnforceableSchema:
    """The part of `schema` that a grammar can enforce. It has been compiled.

    Args:
        options: options of the compiler, for example for white space.
        strict: whether the whole schema must be enforced.

    Raises GrammarError if the schema is too large or wrong, with the place, or if `strict` and a keyword cannot be
    enforced, with the keyword.
    """
    if not isinstance(schema, Mapping | bool):
        raise GrammarError("a schema must be an object or a boolean")
    if schema is False:
        raise GrammarError("nothing is valid by the schema `false`")
    try:
        held = _held({} if schema is True else schema, options)
    except RecursionError as error:
        raise GrammarError("the schema is nested too deeply") from error
    if strict and held.unenforced:
        raise GrammarError(
            f"a grammar cannot hold the keyword {held.unenforced[0]}; leave it out, or do without `strict`"
        )
    return held


def _held(schema: Mapping[str, Any], options: Mapping[str, Any]) -> EnforceableSchema:
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except ValueError as error:
        raise GrammarError(f"the schema cannot be read: {error}") from error
    if size > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"has {size} characters; at most {MAX_GRAMMAR_CHARS} are allowed")
    reader = _Reader(schema)
    read = {**reader.read(schema), "x-guidance": options}
    try:
        warnings = _compiled(read)
    except GrammarError as error:
        place = place_of_fault(read, str(error), lambda inner: _fault_of({**inner, "x-guidance": options}))
        raise GrammarError(f"{error} (at {place[:MAX_MESSAGE_CHARS]})") from error
    unenforced = tuple(dict.fromkeys([*reader.left_out, *_keywords(warnings)]))
    return EnforceableSchema(f"%json {json.dumps(read)}", unenforced)


def _compiled(schema: Schema) -> list[str]:
    """The compiler's warnings. Raises GrammarError."""
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    return list(compile_grammar(grammar, Vocabulary.of_bytes()).get_grammar_warnings())


def _fault_of(schema: Schema) -> str:
    try:
        _compiled(schema)
    except GrammarError as error:
        return str(error)
    return ""


def _keywords(warnings: Iterable[str]) -> Iterator[str]:
    """The keywords that the compiler warns of. An unknown format is an annotation."""
    for warning in warnings:
        if warning.startswith("Unimplemented keys"):
            yield from (name for name in re.findall(r'"([^"]+)"', warning) if name not in _NO_LOSS)
        elif warning.startswith("oneOf"):
            yield "oneOf"
        elif warning.startswith("min/maxProperties"):
            yield from ("minProperties", "maxProperties")
        elif not warning.startswith("Unknown format"):
            yield warning[:MAX_MESSAGE_CHARS]


class _Reader:
    """Removes the parts of schemas on which the compiler fails."""

    def __init__(self, root: Any) -> None:
        multiples = {str(each["multipleOf"]) for each in _all_inside(root) if "multipleOf" in each}
        self._max_multiple = MAX_MULTIPLE if len(multiples) == 1 else MAX_OF_SEVERAL
        self.left_out: list[str] = []

    def read(self, schema: Any) -> Any:
        """The schema, with all schemas inside it, as the compiler takes it."""
        if not isinstance(schema, Mapping):
            return schema
        here: Schema = dict(schema)
        if "multipleOf" in here and not self._is_held_multiple(here["multipleOf"]):
            self._leave_out(here, "multipleOf")
        for name, is_held in _HELD.items():
            if name in here and not is_held(here):
                self._leave_out(here, name)
        for name, value in _ALL_VALID.items():
            if here.get(name) is value or (name == "propertyNames" and here.get(name) == {"type": "string"}):
                del here[name]
        for name, other in _UNEVALUATED:
            if name in here and here.keys().isdisjoint(_EVALUATING) and not isinstance(here.get(other), list):
                here.setdefault(other, here.pop(name))
        if "format" in here and isinstance(here["format"], str):
            here["format"] = _SAME_FORMATS.get(here["format"], here["format"])
            if here["format"] not in _FORMATS:
                del here["format"]
        for name, value in here.items():
            if name in _MAPS and isinstance(value, Mapping):
                here[name] = {key: self.read(inner) for key, inner in value.items()}
            elif name in (*_LISTS, "items") and isinstance(value, list):
                here[name] = [self.read(inner) for inner in value]
            elif name in (*_SCHEMAS, "items"):
                here[name] = self.read(value)
        return here

    def _is_held_multiple(self, multiple: Any) -> bool:
        if isinstance(multiple, bool) or not isinstance(multiple, int | float):
            return True  # a value of a wrong type, which the compiler refuses
        scaled = abs(multiple)
        while 0 < scaled <= self._max_multiple and scaled % 1:
            scaled *= 10  # as the compiler does, in doubles
        return bool(scaled <= self._max_multiple)

    def _leave_out(self, here: Schema, name: str) -> None:
        del here[name]
        self.left_out.append(name)
        if name == "patternProperties" and "additionalProperties" in here:
            self._leave_out(here, "additionalProperties")  # it does not speak of the names that fit a pattern


def _is_exact(number: float) -> bool:
    """Whether the compiler writes exactly this number. It reads the digits and the power of ten as two doubles, so it
    misreads some numbers of more than 15 digits."""
    _, digits, exponent = Decimal(str(number)).as_tuple()
    is_short = int("".join(map(str, digits))) <= 2**53 and int(exponent) >= LEAST_EXPONENT
    return is_short and abs(number) <= 2**53


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(inner)


def _is_held_bound(name: str) -> Callable[[Schema], bool]:
    def holds(here: Schema) -> bool:
        bound = here[name]
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            return True  # of draft 4, or a value of a wrong type, which the compiler refuses
        return _is_exact(bound) or (abs(bound) < MAX_BOUND and int(float(bound)) == bound)

    return holds


def _is_held_count(name: str) -> Callable[[Schema], bool]:
    """Properties are counted if all that are listed are required. If not, one more than those may be asked for."""

    def holds(here: Schema) -> bool:
        listed, required, count = here.get("properties"), here.get("required", []), here[name]
        if not (isinstance(listed, Mapping) and isinstance(required, list) and isinstance(count, int)):
            return True
        if all(each in required for each in listed) or (name == "minProperties" and count <= len(required)):
            return True
        is_closed = here.get("additionalProperties") is False and not here.get("patternProperties")
        return is_closed and count == len(required) + 1

    return holds


def _is_regex(pattern: Any) -> bool:
    """Whether the compiler's engine of regular expressions has all that the pattern uses."""
    return not (isinstance(pattern, str) and _UNKNOWN_TO_ENGINE.search(pattern))


_HELD: dict[str, Callable[[Schema], bool]] = {
    "const": lambda here: all(map(_is_exact, _numbers(here["const"]))),
    "enum": lambda here: all(map(_is_exact, _numbers(here["enum"]))),
    **{name: _is_held_bound(name) for name in _BOUNDS},
    **{name: _is_held_count(name) for name in ("minProperties", "maxProperties")},
    "pattern": lambda here: _is_regex(here["pattern"]),
    "patternProperties": lambda here: (
        not isinstance(here["patternProperties"], Mapping) or all(map(_is_regex, here["patternProperties"]))
    ),
}


def place_of_fault(schema: Mapping[str, Any], fault: str, compile: Callable[[Mapping[str, Any]], str]) -> str:
    """A JSON pointer to the innermost schema that, compiled by itself, has the same fault.

    Args:
        fault: the result of `compile` for the whole schema.
        compile: the fault of a schema, "" if it has none.
    """
    pointer, here = "#", schema
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
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


def _all_inside(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas inside it."""
    if isinstance(schema, Mapping):
        yield schema
        for _, inner in _subschemas(schema):
            yield from _all_inside(inner)


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly inside a schema, with the end of their JSON pointers."""
    for name in _MAPS:
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            escaped = ((key.replace("~", "~0").replace("/", "~1"), s) for key, s in inner.items())
            yield from ((f"{name}/{key}", s) for key, s in escaped if isinstance(s, Mapping))
    for name in (*_LISTS, "items"):
        inner = schema.get(name)
        if isinstance(inner, list):
            yield from ((f"{name}/{i}", s) for i, s in enumerate(inner) if isinstance(s, Mapping))
    for name in (*_SCHEMAS, "items"):
        inner = schema.get(name)
        if isinstance(inner, Mapping):
            yield name, inner
