"""Decodes request bodies: the first step of a request.

Declared fields are decoded. The table of fields decides about all other fields. Fields with arbitrary JSON are kept as
bytes, and `read_raw` decodes them within their own bounds.

The marks of a long body are counted before it is decoded: the brackets and colons outside strings. Decoding is one call
that holds the interpreter's lock, even in a thread, and the marks are what takes time: 8 MB of empty lists take about
0.4 s, and of numbers 0.06 s.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import inspect
from starlette.requests import Request

from server.api.record import IGNORED, note
from server.api.request.fields import HARMLESS, SYNONYMS, is_ignored, refusal, served_name
from server.api.request.schemas import Generates
from server.api.worker_threads import in_thread
from server.http.body import BodyLimits, UnknownFieldError, decode_body, read_body
from server.http.request_error import RequestError, invalid

logger = logging.getLogger("pallas_serve")

MAX_NAMES = 200  # unknown fields that one route warns of; clients choose their names
MAX_NAME_CHARS = 80
MAX_HARMLESS_BYTES = 64  # a longer value is never a harmless one
MAX_DEPTH = 12  # names and places of a path: an object that is deeper may have declared fields only

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decode_list = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_decode_raws = msgspec.json.Decoder(list[msgspec.Raw])
_decode_value = msgspec.json.Decoder(Any)
LONG_BODY = 64 * 1024  # bytes; a shorter body has few entries
BYTES_OF_WORK = 16  # to decode, as much work as a character to encode
PIECE_BYTES = 64 * 1024
_MARKS = (b"[", b"{", b":")
_NO_BACKSLASH = re.compile(rb"[^\\]")

RawField = msgspec.Raw | msgspec.UnsetType


class BodyReader[T: msgspec.Struct]:
    """Reads bodies of the struct `kind`.

    A body with only declared fields is decoded once. Any other body is decoded again without its undeclared fields.
    Fields that are kept as they came (`msgspec.Raw`) are looked through if `kind.raw_types` has their types.

    Args:
        translate: makes another request of the body, in the thread in which a long body is decoded.
    """

    def __init__(
        self, kind: type[T], *, strict: bool, translate: Callable[..., Any] = lambda read, *, strict: read
    ) -> None:
        self._decoder = msgspec.json.Decoder(kind, strict=False)
        raw = [(name, RawField, msgspec.UNSET) for name in kind.__struct_fields__]
        self._fields = msgspec.json.Decoder(msgspec.defstruct("Fields", raw, kw_only=True))
        self._kind = kind
        self._raw_types: Mapping[str, type[msgspec.Struct]] = getattr(kind, "raw_types", {})
        self._strict = strict
        self._translate = translate
        self._warned: set[str] = set()

    async def read(self, request: Request, limits: BodyLimits) -> Any:
        """The body, or what `translate` makes of it. Raises RequestError for an unreadable body, a refused field, or a
        value of a wrong type."""
        body = await read_body(request, limits)
        return await in_thread(len(body) // BYTES_OF_WORK, self._read, body, limits.max_marks)

    def _read(self, body: bytes, max_marks: int) -> Any:
        if len(body) >= LONG_BODY and count_marks(body, max_marks) > max_marks:
            raise self._too_many_marks(body, max_marks)
        try:
            read = decode_body(self._decoder, body)
        except UnknownFieldError:
            read = decode_body(self._decoder, self._declared(body, self._kind, ""))
        else:
            self._clean(read)
        return self._translate(read, strict=self._strict)

    def _too_many_marks(self, body: bytes, most: int) -> RequestError:
        """The error of a body with more than `most` marks. It names the field that has most of them."""
        fields = msgspec.structs.asdict(decode_body(self._fields, body))
        counts = {name: count_marks(bytes(raw), most) for name, raw in fields.items() if raw is not msgspec.UNSET}
        largest = max(counts, key=counts.__getitem__, default="")
        param = largest if 2 * counts.get(largest, 0) > most else None
        where = "The body" if param is None else f"{param}: the body"
        message = f"{where} has more than {most} brackets and colons outside of texts. Please send fewer."
        return RequestError(400, message, param=param)

    def _clean(self, read: T) -> None:
        """Removes undeclared fields from the undecoded fields whose types are known."""
        for name, kind in self._raw_types.items():
            if isinstance(raw := getattr(read, name), msgspec.Raw):
                setattr(read, name, msgspec.Raw(self._declared(bytes(raw), kind, f"{name}.")))

    def _declared(self, value: bytes, kind: type[msgspec.Struct], path: str) -> bytes:
        """The JSON of an object, or of a list of objects or of such lists, without the fields that their type does not
        declare.

        Any other JSON is returned unchanged; its reader reports the wrong type.
        """
        value = value.lstrip()
        try:
            if value.startswith(b"[") and value[1:2048].lstrip().startswith(b"["):
                lists = _decode_raws.decode(value)
                return _list(self._declared(bytes(raw), kind, f"{path}{i}.") for i, raw in enumerate(lists))
            if value.startswith(b"["):
                items = _decode_list.decode(value)
                return _list(self._kept(item, kind, f"{path}{i}.") for i, item in enumerate(items))
            if value.startswith(b"{"):
                return self._kept(_decode_object.decode(value), kind, path)
        except msgspec.DecodeError:
            return value
        return value

    def _kept(self, fields: dict[str, msgspec.Raw], kind: type[msgspec.Struct], path: str) -> bytes:
        inner = inner_types(kind) if path.count(".") < MAX_DEPTH else {}
        kept: dict[str, msgspec.Raw] = {}
        for name, raw in (_renamed(fields, kind, path) if issubclass(kind, Generates) else fields).items():
            if name in inner:
                kept[name] = msgspec.Raw(self._declared(bytes(raw), inner[name], f"{path}{name}."))
            elif name in kind.__struct_fields__:
                kept[name] = raw
            else:
                self._judge(name, raw, kind, path)
        return msgspec.json.encode(kept)

    def _judge(self, name: str, raw: msgspec.Raw, kind: type[msgspec.Struct], path: str) -> None:
        if is_ignored(path, name):
            return
        refused = refusal(kind, path, name)
        param = f"{path}{name[:MAX_NAME_CHARS]}"
        if refused is None:
            self._unknown(param, name)
            return
        value = decode_body(_decode_value, bytes(raw)) if len(raw) <= MAX_HARMLESS_BYTES else raw
        if refused.concerns(value):
            if refused.tunes and not self._strict:
                self._note(name, "the field %r has no effect here: %s (--strict-fields refuses it)", param, refused.why)
                return
            raise RequestError(400, f"{param}: {refused.why}.", param=param, code="unsupported_parameter")

    def _unknown(self, param: str, name: str) -> None:
        if self._strict:
            message = f"{param}: this server does not know the field, and it refuses such fields (--strict-fields)."
            raise RequestError(400, message, param=param, code="unknown_parameter")
        self._note(name, "the unknown field %r is ignored (--strict-fields refuses such fields)", param)

    def _note(self, name: str, message: str, param: str, *args: object) -> None:
        note(IGNORED, param)
        if name in self._warned or len(self._warned) >= MAX_NAMES:
            return
        self._warned.add(name)
        more = "" if len(self._warned) < MAX_NAMES else "; further fields are ignored without a warning"
        logger.warning(message + more, param, *args)


def _renamed(fields: dict[str, msgspec.Raw], kind: type[msgspec.Struct], path: str) -> dict[str, msgspec.Raw]:
    """The fields under their declared names. Raises RequestError 400 for a field with two values under two names."""
    renamed = dict(fields)
    for name in fields.keys() & SYNONYMS.keys() - set(kind.__struct_fields__):
        served, raw = served_name(kind, name), bytes(fields[name])
        if served is None or raw == b"null" or (raw == b"-1" and -1 in HARMLESS.get(name, ())):
            continue
        if bytes(renamed.get(served, b"null")) not in (b"null", raw):
            raise invalid(f"{path}{name}", f"is another name of `{served}`, which has another value")
        renamed[served] = renamed.pop(name)
    return renamed


@functools.cache
def inner_types(kind: type[msgspec.Struct]) -> Mapping[str, type[msgspec.Struct]]:
    """The types of the fields that hold objects, or lists of them."""
    fields = inspect.type_info(kind).fields  # type: ignore[attr-defined]
    found = {field.name: struct for field in fields if (struct := _struct_in(field.type)) is not None}
    return found | dict(getattr(kind, "raw_types", {}))


def _struct_in(type: inspect.Type) -> Any:
    match type:
        case inspect.StructType(cls=cls):
            return cls
        case inspect.UnionType(types=types):
            return next((struct for each in types if (struct := _struct_in(each)) is not None), None)
        case inspect.ListType(item_type=item) | inspect.Metadata(type=item):
            return _struct_in(item)
    return None


def _list(items: Any) -> bytes:
    return b"[" + b",".join(items) + b"]"


def count_marks(json: bytes, most: int) -> int:
    """The number of brackets and colons outside strings. Counting ends above `most`."""
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


def read_raw[T](param: str, raw: RawField, decoder: msgspec.json.Decoder[T | None], *, max_bytes: int) -> T | None:
    """Decodes an undecoded field. Returns None if it was not given. Raises RequestError 400."""
    if raw is msgspec.UNSET:
        return None
    if len(raw) > max_bytes:
        raise invalid(param, f"is larger than {max_bytes} bytes")
    try:
        return decoder.decode(raw)
    except RecursionError as error:
        raise invalid(param, "is nested too deeply") from error
    except ValueError as error:
        raise RequestError(400, f"{param}: {error}", param=param) from error


def is_deeper_than(most: int, value: Any) -> bool:
    """Whether lists and objects are nested more than `most` deep."""
    level = [value]
    for _ in range(most + 1):
        level = [inner for item in level for inner in _items(item)]
    return bool(level)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()
