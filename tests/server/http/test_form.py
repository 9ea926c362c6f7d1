"""Multipart forms, in whatever pieces they come."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import UploadFile
from starlette.requests import Request

from server.http.body import read_form
from server.http.request_error import RequestError

CONTENTS = st.one_of(
    st.binary(max_size=40), st.lists(st.sampled_from([b"\r\n", b"--a-b", b"--", b"\r", b"\n-"])).map(b"".join)
).filter(lambda content: b"\r\n--a-b" not in b"\r\n" + content)
FILE = b'--a-b\r\nContent-Disposition: form-data; name="file"; filename="n \\"0\\""\r\n\r\n'
CHUNK = 2**16


def read(
    pieces: list[bytes], content_type: str = "multipart/form-data; boundary=a-b"
) -> tuple[list[tuple[str, str | bytes]], int]:
    """The parts of a form, and how often the event loop had its turn meanwhile. Pieces that are not read stay."""
    turns = 0

    async def receive() -> dict:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def parts() -> list[tuple[str, str | bytes]]:
        request = Request({"type": "http", "headers": [(b"content-type", content_type.encode())]}, receive)
        others = asyncio.create_task(count_turns())
        form = await read_form(request, max_bytes=2**24, max_fields=2, max_field_bytes=64)
        others.cancel()
        found = [(name, await x.read() if isinstance(x, UploadFile) else x) for name, x in form.multi_items()]
        await form.close()
        return found

    return asyncio.run(parts()), turns


def cut(body: bytes, size: int) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


@given(CONTENTS, st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_parts_are_those_that_were_written(content, cuts, is_quoted):
    body = (
        FILE + content + b'\r\n--a-b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--a-b--\r\nend'
    )
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    boundary = '"a-b"' if is_quoted else "a-b"
    pieces = [body[a:b] for a, b in pairwise(edges)]
    parts, _ = read(pieces, f"multipart/form-data; boundary={boundary}; charset=utf-8")
    assert parts == [("file", content), ("purpose", "batch")]


@pytest.mark.parametrize(
    "body",
    [
        b"--a-bx\r\n",
        b"--a-b\r\n\r\n\r\n--a-b--",
        b"--a-b\r\nContent-Disposition: form-data\r\n\r\n\r\n--a-b--",
        b"x" * 20_000,
        FILE.replace(b'; filename="n \\"0\\""', b"") + b"x" * 65,
        FILE + b"\r\n" + FILE,
    ],
)
def test_what_is_no_form_is_refused(body):
    with pytest.raises(RequestError) as refused:
        read(cut(body, 7))
    assert refused.value.status == 400


@pytest.mark.parametrize(("content_type", "status"), [("multipart/form-data", 400), ("text/plain; boundary=a-b", 415)])
def test_another_content_type_is_refused(content_type, status):
    with pytest.raises(RequestError) as refused:
        read([FILE], content_type)
    assert refused.value.status == status


@pytest.mark.parametrize(
    "repeated",
    [b'--a-b\r\nContent-Disposition: form-data; name="f"\r\n\r\n\r\n', b"--a-b\r\n" + b"a: b\r\n" * 20_000, FILE],
    ids=["fields", "headers", "files"],
)
def test_hundreds_of_thousands_of_parts_are_refused_at_the_first_of_them(repeated):
    pieces = cut(repeated * (2**24 // len(repeated)), CHUNK)
    num_pieces = len(pieces)
    with pytest.raises(RequestError) as refused:
        read(pieces)
    assert refused.value.status == 400
    assert len(pieces) == num_pieces - 1  # nothing but the first piece was read


def test_other_requests_have_their_turn_after_each_piece_of_a_file():
    """A piece of line ends costs the parser the most."""
    pieces = cut(FILE + b"\r\n" * 2**20 + b"--a-b--\r\n", CHUNK)
    num_pieces = len(pieces)
    parts, turns = read(pieces)
    assert parts == [("file", b"\r\n" * (2**20 - 1))]
    assert turns >= num_pieces
