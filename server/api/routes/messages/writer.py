"""The answers of /v1/messages: one object, or events."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec

from server.api.answers.writer import AnswerHead
from server.api.route import ErrorForm
from server.engine.generation import CUT, Choice, ChoiceDelta, Generation
from server.http.encoding import NestedList, event_pieces
from server.http.request_error import RequestError
from server.text.tool_calls.pieces import CallDelta, Piece, Reasoning

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorObject(msgspec.Struct):
    """The error object of Anthropic's API."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, tag="error"):
    """The body of an answer to a refused request, in Anthropic's form."""

    error: AnthropicErrorObject


def _error(error: RequestError) -> AnthropicError:
    return AnthropicError(AnthropicErrorObject(ERROR_TYPES.get(error.status, "api_error"), error.message))


ANTHROPIC_ERRORS = ErrorForm(type=AnthropicError, body=_error)


class MessagesWriter:
    """A `Writer` for one choice."""

    def __init__(self, generation: Generation, head: AnswerHead) -> None:
        self._generation = generation
        self._head = head
        self._num_blocks = 0
        self._kind: type[Piece] | None = None  # of the open block

    def whole(self) -> dict[str, Any]:
        (choice,) = self._generation.choices
        pieces = choice.take().pieces
        body = self._message(choice, NestedList(map(_block, pieces))) | _stop(choice)
        return body | {"usage": _usage(choice)}

    def opening(self, choice: Choice) -> Iterable[bytes]:
        usage = _usage(choice) | {"output_tokens": 0}
        message = self._message(choice, []) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def gained(self, choice: Choice, choice_delta: ChoiceDelta) -> Iterable[bytes]:
        return chain.from_iterable([self._piece_events(piece) for piece in choice_delta.pieces])

    def ending(self, choice: Choice) -> Iterable[bytes]:
        delta = _event("message_delta", delta=_stop(choice), usage=_usage(choice))
        return chain(self._close(), delta, _event("message_stop"))

    def last(self) -> bytes:
        return b""

    def failed(self, error: RequestError) -> bytes:
        return b"".join(_event("error", error=_error(error).error))

    def _piece_events(self, piece: Piece) -> Iterable[bytes]:
        begins = type(piece) is not self._kind or (isinstance(piece, CallDelta) and piece.name)
        before = chain(self._close(), self._open(piece)) if begins else ()
        index = self._num_blocks - 1
        if isinstance(piece, CallDelta):
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
        elif isinstance(piece, Reasoning):
            delta = {"type": "thinking_delta", "thinking": piece.text}
        else:
            delta = {"type": "text_delta", "text": piece.text}
        return chain(before, _event("content_block_delta", index=index, delta=delta))

    def _open(self, piece: Piece) -> Iterable[bytes]:
        self._kind = type(piece)
        self._num_blocks += 1
        empty = _call_block(piece.name, {}) if isinstance(piece, CallDelta) else _block(replace(piece, text=""))
        return _event("content_block_start", index=self._num_blocks - 1, content_block=empty)

    def _close(self) -> Iterable[bytes]:
        return _event("content_block_stop", index=self._num_blocks - 1) if self._num_blocks else ()

    def _message(self, choice: Choice, content: Any) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "type": "message", "role": "assistant", "model": head.model, "content": content}


def _block(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, CallDelta):
        return _call_block(piece.name, _input(piece.arguments))
    if isinstance(piece, Reasoning):
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    return {"type": "text", "text": piece.text}


def _call_block(name: str | None, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": name, "input": arguments}


def _input(arguments: str) -> Any:
    """The field `input` of a call, which must be an object. Arguments with half of a surrogate pair, which UTF-8 does
    not have, become a text field of the object."""
    raw = arguments.encode()
    try:
        msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return {"arguments": arguments}
    return msgspec.Raw(raw)


def _stop(choice: Choice) -> dict[str, Any]:
    if choice.finish_reason in CUT:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "tool_use" if choice.num_calls else "end_turn", "stop_sequence": None}


def _usage(choice: Choice) -> dict[str, Any]:
    """The `usage` object. Cached prompt tokens are counted separately."""
    cached = choice.num_cached_tokens
    return {
        "input_tokens": choice.num_prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": choice.num_tokens,
    }


def _event(kind: str, **fields: Any) -> Iterable[bytes]:
    return event_pieces({"type": kind, **fields}, kind)
