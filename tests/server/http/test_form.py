"""Multipart forms, in whatever pieces they come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from server.http.form import FormReader
from server.http.request_error import RequestError

BOUNDARY = "a-b"
CONTENTS = st.lists(
    st.one_of(
        st.binary(max_size=40), st.lists(st.sampled_from([b"\r\n", b"--a-b", b"--", b"\r", b"\n-"])).map(b"".join)
    ).filter(lambda content: b"\r\n--a-b" not in b"\r\n" + content),
    max_size=4,
)


def read(body: bytes, cuts: Sequence[int], content_type: str) -> list[tuple[str, str | None, bytes]]:
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    pieces = [body[start:end] for start, end in pairwise(edges)]

    async def receive() -> dict:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def parts() -> list[tuple[str, str | None, bytes]]:
        request = Request({"type": "http", "headers": [(b"content-type", content_type.encode())]}, receive)
        form = FormReader(request, 30_000)
        return [
            (part.name, part.filename, b"".join([piece async for piece in form.pieces()]))
            async for part in form.parts()
        ]

    return asyncio.run(parts())


@given(CONTENTS, st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_parts_are_those_that_were_written(contents, cuts, is_quoted):
    body = b""
    for number, content in enumerate(contents):
        body += b'--a-b\r\nContent-Disposition: form-data; name="f%d"; filename="n \\"%d\\""\r\n\r\n' % (number, number)
        body += content + b"\r\n"
    boundary = f'"{BOUNDARY}"' if is_quoted else BOUNDARY
    found = read(body + b"--a-b--\r\nepilogue", cuts, f"multipart/form-data; boundary={boundary}; charset=utf-8")
    assert found == [(f"f{number}", f'n "{number}"', content) for number, content in enumerate(contents)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--a-b",
        b"--a-bx\r\n",
        b"--a-b\r\n\r\n\r\n--a-b--",
        b"--a-b\r\nContent-Disposition: form-data\r\n\r\n\r\n--a-b--",
        b'--a-b\r\nContent-Disposition: form-data; name="a"\r\n\r\nb',
        b"x" * 20_000,
    ],
)
def test_what_is_no_form_is_refused(body):
    with pytest.raises(RequestError) as refused:
        read(body, [1, 7], f"multipart/form-data; boundary={BOUNDARY}")
    assert refused.value.status == 400
