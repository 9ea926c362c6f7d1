"""JSON objects with typed fields: the types with their ranges, and a reader that names every problem at once.

A schema is a `msgspec.Struct`. Fields of the object that it does not have are ignored. null is the same as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

import msgspec

from model.inputs.words import shown


def described_as[T](kind: type[T], words: str, **limits: Any) -> Any:
    """`kind`, to be called `words` where a value is refused. `limits` are those of `msgspec.Meta`."""
    return Annotated[kind, msgspec.Meta(description=words, **limits)]


def integer(low: int, high: int) -> Any:
    return described_as(int, f"an integer from {low} to {high}", ge=low, le=high)


def number(low: float, high: float) -> Any:
    return described_as(float, f"a number from {low:g} to {high:g}", ge=low, le=high)


def number_above(low: float, high: float) -> Any:
    return described_as(float, f"a number above {low:g} and at most {high:g}", gt=low, le=high)


TRUTH = described_as(bool, "true or false")
TEXT = described_as(str, "a text")


def decode[S: msgspec.Struct](raw: Mapping[str, Any], schema: type[S]) -> S:
    """The fields of `raw` that `schema` has. ValueError naming every one that is missing or wrong."""
    value, problems = check(raw, schema)
    if value is None:
        raise ValueError("; ".join(problems))
    return value


def check[S: msgspec.Struct](raw: Mapping[str, Any], schema: type[S]) -> tuple[S | None, list[str]]:
    """As `decode`, with the problems in place of an error; where there are any, None in place of the value."""
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


def _words(kind: Any) -> str:
    """The description of a type that `described_as` made, alone or in a union with None."""
    return next(meta.description for part in (kind, *get_args(kind)) for meta in getattr(part, "__metadata__", ()))
