"""JSON objects with typed fields: the types with their ranges, and a reader that reports all problems at once.

A schema is a `msgspec.Struct`. Its fields are `Annotated[TYPE, RANGE]`, with a range from a function of this module.
Fields of the object that the schema does not have are ignored. null is the same as absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

import msgspec

from model.inputs.words import shown


def described_as(words: str, **limits: Any) -> msgspec.Meta:
    """A range with its description, which error messages show. `limits` are those of `msgspec.Meta`."""
    return msgspec.Meta(description=words, **limits)


def integer(low: int, high: int) -> msgspec.Meta:
    """The range of an `int`."""
    return described_as(f"an integer from {low} to {high}", ge=low, le=high)


def number(low: float, high: float) -> msgspec.Meta:
    """The range of a `float`."""
    return described_as(f"a number from {low:g} to {high:g}", ge=low, le=high)


def number_above(low: float, high: float) -> msgspec.Meta:
    """The range of a `float`, without its lower bound."""
    return described_as(f"a number above {low:g} and at most {high:g}", gt=low, le=high)


TRUTH = Annotated[bool, described_as("true or false")]
TEXT = Annotated[str, described_as("a text")]


def decode[S: msgspec.Struct](raw: Mapping[str, Any], schema: type[S]) -> S:
    """The fields of `schema` in `raw`. A ValueError names every missing or wrong field."""
    value, problems = check(raw, schema)
    if value is None:
        raise ValueError("; ".join(problems))
    return value


def check[S: msgspec.Struct](raw: Mapping[str, Any], schema: type[S]) -> tuple[S | None, list[str]]:
    """The fields of `schema` in `raw`, and the problems: every missing or wrong field. The fields are None if there are
    problems."""
    values, problems = {}, []
    for field in msgspec.structs.fields(schema):
        name, value = field.encode_name, raw.get(field.encode_name)
        if value is None:
            if field.required:
                problems.append(f"{name} is missing")
            continue
        try:
            values[field.name] = msgspec.convert(value, field.type)
            msgspec.json.encode(value)
        except msgspec.ValidationError:
            problems.append(f"{name}={shown(value)} is not {_words(field.type)}")
        except UnicodeEncodeError:
            problems.append(f"{name}={shown(value)} holds half of a surrogate pair, which is no text")
    return (None if problems else schema(**values)), problems


def unsupported(raw: Mapping[str, Any], read: Mapping[str, Sequence[Any]], prefix: str = "") -> list[str]:
    """The settings of `raw` that have other values than those that are read, in words. null is the same as absent, and
    is allowed if None is among the values."""
    problems = []
    for name, values in read.items():
        found = raw.get(name)
        if not any(found == value and isinstance(found, bool) == isinstance(value, bool) for value in values):
            named = " or ".join(repr(value) for value in values if value is not None)
            only = f" (only {named})" if named else ""
            problems.append(f"{prefix}{name}={shown(found)} is not supported{only}")
    return problems


def _words(kind: Any) -> str:
    """The description of an annotated type, alone or in a union with None."""
    metas = (meta for part in (kind, *get_args(kind)) for meta in getattr(part, "__metadata__", ()))
    return str(next(metas).description)
