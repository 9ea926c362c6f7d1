"""The answers of /v1/responses: one object, or typed events with sequence numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from server.api.routes.responses.record import IN_PROGRESS, INCOMPLETE, CallItem, Item, ResponseRecord
from server.engine.generation import Choice, Gain, Generation, ScoredToken
from server.http.errors import RequestError
from server.http.json_pieces import LongText, json_pieces
from server.text.tool_calls.pieces import Piece


class ResponsesWriter:
    """A `Writer` for one choice. `on_end` is called when the record is complete."""

    def __init__(self, generation: Generation, record: ResponseRecord, on_end: Callable[[], None]) -> None:
        self._generation = generation
        self._record = record
        self._on_end = on_end
        self._num_events = 0

    def whole(self) -> Iterator[bytes]:
        (choice,) = self._generation.choices
        gain = choice.take()
        if gain.scored:
            self._record.add(gain.text, gain.scored)
        else:
            for piece in gain.pieces:
                self._record.add(piece)
        self._finish(choice)
        return json_pieces(self._record.body())

    def opening(self, choice: Choice) -> Iterable[bytes]:
        return self._events(self._response("response.created"), self._response("response.in_progress"))

    def gained(self, choice: Choice, gain: Gain) -> Iterable[bytes]:
        if gain.scored:  # then there are no calls; the text of these tokens may come later
            return self._piece_events(gain.text, gain.scored)
        return chain.from_iterable([self._piece_events(piece) for piece in gain.pieces])

    def _piece_events(self, piece: Piece, scored: Sequence[ScoredToken] = ()) -> Iterable[bytes]:
        last = self._record.items[-1] if self._record.items else None
        item, text, is_new = self._record.add(piece, scored)
        before = self._done(last) if is_new and last is not None else ()
        added = self._added(item) if is_new else ()
        return chain(before, added, self._delta(item, text, scored) if text or scored else ())

    def ending(self, choice: Choice) -> Iterable[bytes]:
        opened: Iterable[bytes] = ()
        if not self._record.items:
            item, _, _ = self._record.add("")
            opened = self._added(item)
        self._finish(choice)
        done = self._done(self._record.items[-1])
        kind = "response.incomplete" if self._record.status == INCOMPLETE else "response.completed"
        return chain(opened, done, self._events(self._response(kind)))

    def last(self) -> bytes:
        return b""

    def failed(self, error: RequestError) -> bytes:
        self._record.fail(error)
        self._on_end()
        return b"".join(self._events(self._response("response.failed")))

    def _finish(self, choice: Choice) -> None:
        self._record.finish(choice)
        self._on_end()

    def _response(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "response": self._record.body()}

    def _added(self, item: Item) -> Iterable[bytes]:
        kind = "response.output_item.added"
        added = {"type": kind, "output_index": item.index, "item": item.fields(IN_PROGRESS)}
        if isinstance(item, CallItem):
            return self._events(added)
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        part = {"type": "response.content_part.added", "part": empty} | _content_place(item)
        return self._events(added, part)

    def _delta(self, item: Item, text: str, scored: Sequence[ScoredToken]) -> Iterable[bytes]:
        if isinstance(item, CallItem):
            kind, place = "response.function_call_arguments.delta", _item_place(item)
            return self._events({"type": kind, "delta": LongText(text), **place})
        kind, logprobs, place = "response.output_text.delta", item.logprobs_in_event(scored), _content_place(item)
        return self._events({"type": kind, "delta": LongText(text), "logprobs": logprobs, **place})

    def _done(self, item: Item) -> Iterable[bytes]:
        whole = LongText(item.text)
        fields = item.fields(self._record.item_status(item))
        done = {"type": "response.output_item.done", "output_index": item.index, "item": fields}
        if isinstance(item, CallItem):
            kind = "response.function_call_arguments.done"
            arguments = {"type": kind, "name": item.name, "arguments": whole, **_item_place(item)}
            return self._events(arguments, done)
        place = _content_place(item)
        logprobs = item.logprobs_in_event(item.scored)
        text = {"type": "response.output_text.done", "text": whole, "logprobs": logprobs, **place}
        return self._events(text, {"type": "response.content_part.done", "part": item.part(), **place}, done)

    def _events(self, *events: dict[str, Any]) -> Iterable[bytes]:
        """Numbers the events now and encodes them later."""
        numbered = []
        for event in events:
            numbered.append(event | {"sequence_number": self._num_events})
            self._num_events += 1
        return chain.from_iterable(map(_event_pieces, numbered))


def _event_pieces(event: dict[str, Any]) -> Iterator[bytes]:
    yield f"event: {event['type']}\ndata: ".encode()
    yield from json_pieces(event)
    yield b"\n\n"


def _item_place(item: Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index}


def _content_place(item: Item) -> dict[str, Any]:
    return {**_item_place(item), "content_index": 0}
