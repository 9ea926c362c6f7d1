"""Long bodies: their entries are counted before they are decoded, and long lists of numbers are decoded in pieces.

Decoding is one call that holds the interpreter's lock, in a thread too. So a call decodes no more entries than a body
may have marks: brackets, colons and commas outside strings. The commas of lists of numbers do not count. Such a list
has its type's bound, and each call decodes PIECE_BYTES of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from server.http.body import decode_body
from server.http.errors import INVALID_BODY, RequestError, invalid

LONG_BODY = 64 * 1024  # bytes; a shorter body has few entries
PIECE_BYTES = 64 * 1024
_MARKS = (b"[", b"{", b":", b",")
_NO_BACKSLASH = re.compile(rb"[^\\]")

Field = msgspec.Raw | msgspec.UnsetType


class LongBodyReader[T: msgspec.Struct]:
    """Decodes long bodies of the struct `kind`. The work is for a thread: the lock is free between two calls.

    Raises ValueError for a list of numbers without a bound.
    """

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        types = {field.name: field.type for field in inspect.type_info(kind).fields}  # type: ignore[attr-defined]
        self._bounds = {name: bound for name, type in types.items() if (bound := _bound_of_numbers(type)) is not None}
        # every field as it came; the others are skipped
        raw = [(name, Field, msgspec.UNSET) for name in fields]
        self._fields = msgspec.json.Decoder(msgspec.defstruct("Fields", raw, kw_only=True))
        # all fields but lists of numbers; with the type's name, which errors have
        rest = [
            (name, Field if name in self._bounds else field.type, *_default(field)) for name, field in fields.items()
        ]
        without = msgspec.defstruct(kind.__name__, rest, kw_only=True, forbid_unknown_fields=True)
        self._rest = msgspec.json.Decoder(without, strict=False)
        self._decoders = {name: msgspec.json.Decoder(fields[name].type, strict=False) for name in self._bounds}

    def check(self, body: bytes, max_marks: int) -> None:
        """Raises RequestError 400, with the field's name, for too many entries."""
        split = msgspec.structs.asdict(decode_body(self._fields, body))
        given = {name: bytes(raw) for name, raw in split.items() if raw is not msgspec.UNSET}
        free = dict.fromkeys(given, 0)  # commas that do not count
        for name in self._bounds.keys() & given:
            if _is_list_of_numbers(given[name]):
                free[name] = given[name].count(b",")
                if free[name] >= self._bounds[name]:
                    raise invalid(name, f"at most {self._bounds[name]} entries are allowed, got {free[name] + 1}")
        most = max_marks + sum(free.values())
        if count_marks(body, most) <= most:
            return
        counts = {name: count_marks(raw, max_marks + free[name]) - free[name] for name, raw in given.items()}
        largest = max(counts, key=counts.__getitem__, default="")
        param = largest if 2 * counts.get(largest, 0) > max_marks else None
        where = "The body" if param is None else f"{param}: the body"
        message = f"{where} has more than {max_marks} brackets, colons and commas outside of texts. Please send fewer."
        raise RequestError(400, message, type=INVALID_BODY, param=param)

    def decode(self, body: bytes) -> T:
        """The body, which `check` has accepted. Raises as `decode_body`."""
        rest = decode_body(self._rest, body)
        values = {name: getattr(rest, name) for name in self._kind.__struct_fields__}
        for name in self._bounds:
            if isinstance(raw := values[name], msgspec.Raw):
                values[name] = self._numbers(name, bytes(raw))
            elif raw is msgspec.UNSET:
                del values[name]
        return self._kind(**values)

    def _numbers(self, name: str, raw: bytes) -> Any:
        decoder = self._decoders[name]
        if not _is_list_of_numbers(raw):
            return decode_body(decoder, raw, field=name)
        found: list[Any] = []
        depth = 0
        for piece in _pieces_at_commas(raw):
            before = depth
            depth += piece.count(b"[") - piece.count(b"]")
            try:
                items = decoder.decode(b"[" * before + piece + b"]" * depth)
            except msgspec.ValidationError as error:  # its index counts from the beginning of the piece
                text = str(error).partition(" - at ")[0]
                raise RequestError(400, f"{name}: {text}", type=INVALID_BODY, param=name) from error
            if before > 1 and found:
                found[-1] += items.pop(0)
            found += items
        return found


def count_marks(json: bytes, most: int) -> int:
    """The brackets, colons and commas outside strings. Counting ends above `most`."""
    count, in_string = 0, False
    start = 0
    while start < len(json) and count <= most:
        cut = _NO_BACKSLASH.search(json, start + PIECE_BYTES - 1)  # a backslash and what it escapes stay together
        end = len(json) if cut is None else cut.end()
        parts = json[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        count += sum(map(outside.count, _MARKS))
        in_string ^= len(parts) % 2 == 0
        start = end
    return count


def _pieces_at_commas(raw: bytes) -> Iterator[bytes]:
    """The pieces of a list of numbers, without the commas between them."""
    start = 0
    while start < len(raw):
        end = raw.find(b",", start + PIECE_BYTES)
        end = len(raw) if end < 0 else end
        yield raw[start:end]
        start = end + 1


def _is_list_of_numbers(raw: bytes) -> bool:
    """Whether it is a list without any string. There may be lists in it."""
    return raw.lstrip()[:1] == b"[" and b'"' not in raw


def _bound_of_numbers(type: inspect.Type) -> int | None:
    """The most entries of the list of whole numbers that a field may have; None: it may have none."""
    if isinstance(type, inspect.UnionType):
        return next((bound for option in type.types if (bound := _bound_of_numbers(option)) is not None), None)
    if not isinstance(type, inspect.ListType):
        return None
    items = type.item_type.types if isinstance(type.item_type, inspect.UnionType) else (type.item_type,)
    if not any(isinstance(item, inspect.IntType) for item in items):
        return None
    if type.max_length is None:
        raise ValueError(f"a list of numbers needs a bound: {type=}")
    return type.max_length


def _default(field: Any) -> tuple[Any, ...]:
    return () if field.required else (field.default,)
