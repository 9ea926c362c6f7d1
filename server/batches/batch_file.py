"""Batch files: OpenAI's JSON lines of requests, plain prompts, and the records of their answers.

A line is `{"custom_id", "method": "POST", "url", "body"}` as in OpenAI's batch API, or `{"prompt": ...}` or
`{"messages": [...]}` or `{"input": ...}` with any other fields of such a request. Blank lines are skipped. A record is
`{"id", "custom_id", "response": {"status_code", "request_id", "body"} or null, "error"}`.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from server.http.encoding import encode_json

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)
URL_BY_FIELD = {"prompt": COMPLETIONS, "messages": CHAT, "input": EMBEDDINGS}  # of plain lines
# one field by all its names
_LIMITS = "max_tokens max_completion_tokens max_output_tokens max_new_tokens num_predict n_predict".split()


INVALID_LINE = "invalid_line"  # the error code of a line that is not a request


class _Named(msgspec.Struct):
    """The fields of an answer that are read here."""

    id: str | None = None


_decode_named = msgspec.json.Decoder(_Named).decode


@dataclass(frozen=True, kw_only=True)
class Line:
    """A request, or the problem of an invalid line."""

    custom_id: str | None
    url: str = ""
    body: dict[str, Any] | None = None
    problem: str | None = None


def parse_line(text: str, number: int, defaults: Mapping[str, Any]) -> Line:
    """Reads a line as a request. `number` counts from 1. `defaults` are body fields for lines that generate and do not
    set these fields."""
    try:
        item = json.loads(text.encode())
    except ValueError as error:
        return Line(custom_id=None, problem=f"line {number} is not JSON: {error}")
    except RecursionError:
        return Line(custom_id=None, problem=f"line {number} is nested too deeply")
    if not isinstance(item, dict):
        return Line(custom_id=None, problem=f"line {number} is not a JSON object")
    custom_id = item.get("custom_id")
    if any("\ud800" <= char <= "\udfff" for char in str(custom_id)):
        return Line(custom_id=None, problem=f"line {number}: custom_id holds half a character, which no file can hold")
    plain_url = next((url for field, url in URL_BY_FIELD.items() if field in item), None)
    if "body" not in item and "url" not in item and plain_url is not None:
        url = plain_url
        body = {key: value for key, value in item.items() if key != "custom_id"}
        custom_id = f"line-{number}" if custom_id is None else str(custom_id)
    elif not isinstance(custom_id, str) or not custom_id:
        return Line(custom_id=None, problem=f"line {number}: custom_id must be a text of its own")
    elif item.get("method", "POST") != "POST":
        return Line(custom_id=custom_id, problem=f"line {number}: method must be POST, not {item['method']!r}")
    elif item.get("url") not in URLS:
        problem = f"line {number}: url must be {', '.join(URLS[:-1])} or {URLS[-1]}"
        return Line(custom_id=custom_id, problem=problem)
    elif not isinstance(item.get("body"), dict):
        return Line(custom_id=custom_id, problem=f"line {number}: body must be a JSON object")
    else:
        url, body = item["url"], item["body"]
    if body.get("stream"):
        return Line(
            custom_id=custom_id, problem=f"line {number}: stream is for the HTTP server; here answers are whole"
        )
    if body.get("background"):
        problem = f"line {number}: background is for the HTTP server; here all answers are waited for"
        return Line(custom_id=custom_id, problem=problem)
    return Line(custom_id=custom_id, url=url, body={**_defaults_of(url, body, defaults), **body})


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yields the remaining lines that are not blank, with their numbers from 1. A line that is not UTF-8 is an invalid
    request, and does not affect the others."""
    for number, raw in enumerate(file, 1):
        text = raw.decode(errors="surrogateescape").strip()
        if text:
            yield number, text


def _defaults_of(url: str, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The default fields of a body for this route. The limit of the output has the route's name for it, and is left out
    if the body has one."""
    if url == EMBEDDINGS:
        return {}
    fields = {name: value for name, value in defaults.items() if name not in _LIMITS}
    limit = next((defaults[name] for name in _LIMITS if name in defaults), None)
    if limit is not None and not any(name in body for name in _LIMITS):
        fields["max_output_tokens" if url == RESPONSES else "max_tokens"] = limit
    return fields


def answer_record(line: Line, status: int, answer: bytes) -> bytes:
    """The record of the server's answer, which may be an error. Answer and record are JSON bytes, because an answer may
    be long."""
    request_id = _decode_named(answer).id or f"req-{uuid.uuid4().hex}"
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(answer)}
    return encode_json({"id": _record_id(), "custom_id": line.custom_id, "response": response, "error": None})


def num_output_tokens(answer: Mapping[str, Any]) -> int:
    """The number of output tokens of an answer."""
    usage = answer.get("usage") or {}
    found: int = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return found


def problem_record(line: Line, code: str = INVALID_LINE, message: str | None = None) -> bytes:
    """The error record of a line without an answer. By default the message is the problem of the line."""
    error = {"code": code, "message": line.problem if message is None else message}
    return encode_json({"id": _record_id(), "custom_id": line.custom_id, "response": None, "error": error})


def _record_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def digest(text: str) -> str:
    """A digest that identifies a line."""
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def input_digest(lines: Iterable[tuple[int, str]]) -> str:
    """A digest that identifies an input, from the numbers and the digests of its lines."""
    found = hashlib.blake2b(digest_size=16)
    for number, line_digest in lines:
        found.update(f"{number} {line_digest}\n".encode())
    return found.hexdigest()
