"""Reads the body of a request type. Declared fields are decoded; a table decides about all other fields."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.requests import Request

from server.api.aside import Aside
from server.api.request.fields import FieldTable
from server.api.request.long_body import LONG_BODY, LongBodyReader
from server.http.body import BodyLimits, UnknownFieldError, decode_body, read_body
from server.http.errors import RequestError

logger = logging.getLogger("pallas_serve")

MAX_NAMES = 200  # unknown fields that one route warns of; clients choose their names
MAX_NAME_CHARS = 80
MAX_HARMLESS_BYTES = 64  # a longer value is never a harmless one

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decode_list = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_decode_value = msgspec.json.Decoder(Any)


class BodyReader[T: msgspec.Struct]:
    """Reads bodies of the struct `kind`, which must be that of the table.

    A body with only declared fields is decoded once. Any other body is decoded again without its undeclared fields.
    Fields that are kept as they came (`msgspec.Raw`) are looked through if the table has their types.
    """

    def __init__(self, kind: type[T], table: FieldTable, *, strict: bool) -> None:
        if kind is not table.kind:
            raise ValueError(f"the table is of another type: {kind=} {table.kind=}")
        self._decoder = msgspec.json.Decoder(kind, strict=False)
        self._long = LongBodyReader(kind)
        self._table = table
        self._strict = strict
        self._warned: set[str] = set()

    async def read(self, request: Request, limits: BodyLimits, aside: Aside) -> T:
        """Raises RequestError for an unreadable body, a refused field, or a value of a wrong type."""
        return (await self.read_with_bytes(request, limits, aside))[0]

    async def read_with_bytes(self, request: Request, limits: BodyLimits, aside: Aside) -> tuple[T, bytes]:
        """As `read`, and the body as it came."""
        body = await read_body(request, limits)
        if len(body) >= LONG_BODY:
            return await aside.run(len(body), self._read_long, body, limits.max_marks), body
        try:
            read = decode_body(self._decoder, body)
        except UnknownFieldError:
            known = await aside.run(len(body), self._declared, body, self._table, "")
            return decode_body(self._decoder, known), body
        size = sum(len(raw) for raw in self._raw_objects(read).values())
        await aside.run(size, self._clean, read)
        return read, body

    def _read_long(self, body: bytes, max_marks: int) -> T:
        self._long.check(body, max_marks)
        try:
            read = self._long.decode(body)
        except UnknownFieldError:
            return self._long.decode(self._declared(body, self._table, ""))
        self._clean(read)
        return read

    def _raw_objects(self, read: T) -> dict[str, msgspec.Raw]:
        """The fields kept as they came whose types the table has."""
        given = {name: getattr(read, name) for name in self._table.inner}
        return {name: raw for name, raw in given.items() if isinstance(raw, msgspec.Raw)}

    def _clean(self, read: T) -> None:
        """Removes undeclared fields from these."""
        for name, raw in self._raw_objects(read).items():
            setattr(read, name, msgspec.Raw(self._declared(bytes(raw), self._table.inner[name], f"{name}.")))

    def _declared(self, value: bytes, table: FieldTable, path: str) -> bytes:
        """The JSON of an object, or of a list of objects, without the fields that their type does not declare.

        Anything else comes back as it is: what reads it reports the wrong type.
        """
        value = value.lstrip()
        try:
            if value.startswith(b"["):
                items = _decode_list.decode(value)
                return _list(self._kept(item, table, f"{path}{i}.") for i, item in enumerate(items))
            if value.startswith(b"{"):
                return self._kept(_decode_object.decode(value), table, path)
        except msgspec.DecodeError:
            return value
        return value

    def _kept(self, fields: dict[str, msgspec.Raw], table: FieldTable, path: str) -> bytes:
        names = table.kind.__struct_fields__
        kept: dict[str, msgspec.Raw] = {}
        for name, raw in fields.items():
            if name not in names:
                self._judge(name, raw, table, path)
            elif name in table.inner:
                kept[name] = msgspec.Raw(self._declared(bytes(raw), table.inner[name], f"{path}{name}."))
            else:
                kept[name] = raw
        return msgspec.json.encode(kept)

    def _judge(self, name: str, raw: msgspec.Raw, table: FieldTable, path: str) -> None:
        if name in table.without_effect:
            return
        refused = table.refused.get(name)
        param = f"{path}{name[:MAX_NAME_CHARS]}"
        if refused is None:
            self._unknown(param, name)
            return
        value = decode_body(_decode_value, bytes(raw)) if len(raw) <= MAX_HARMLESS_BYTES else raw
        if refused.concerns(value):
            raise RequestError(400, f"{param}: {refused.why}.", param=param, code="unsupported_parameter")

    def _unknown(self, param: str, name: str) -> None:
        if self._strict:
            message = f"{param}: this server does not know the field, and it refuses such fields (--strict-fields)."
            raise RequestError(400, message, param=param, code="unknown_parameter")
        if name in self._warned or len(self._warned) >= MAX_NAMES:
            return
        self._warned.add(name)
        note = "" if len(self._warned) < MAX_NAMES else "; further fields are ignored without a warning"
        logger.warning("the unknown field %r is ignored (--strict-fields refuses such fields)%s", param, note)


def _list(items: Any) -> bytes:
    return b"[" + b",".join(items) + b"]"
