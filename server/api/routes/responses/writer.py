"""The answers of /v1/responses: one object, or typed events with sequence numbers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from server.api.routes.responses.items import INCOMPLETE
from server.api.routes.responses.record import (
    IN_PROGRESS,
    Added,
    CallItem,
    CustomCallItem,
    Item,
    ReasoningItem,
    ResponseRecord,
)
from server.engine.generation import Choice, ChoiceDelta, Generation
from server.http.encoding import event_pieces
from server.http.request_error import RequestError
from server.text.tool_calls.pieces import Piece


class ResponsesWriter:
    """A `Writer` for one choice."""

    def __init__(self, generation: Generation, record: ResponseRecord) -> None:
        self._generation = generation
        self._record = record
        self._num_events = 0

    def whole(self) -> dict[str, Any]:
        (choice,) = self._generation.choices
        choice_delta = choice.take()
        self._record.receive(choice_delta.scored)
        for piece in choice_delta.pieces:
            self._record.add(piece)
        self._record.add_rest()
        self._record.finish(choice)
        return self._record.body()

    def queued(self) -> bytes:
        """The events before the engine has begun, of a response in the background."""
        return b"".join(self._events(self._response("response.created"), self._response("response.queued")))

    def opening(self, choice: Choice) -> Iterable[bytes]:
        self._record.begin()
        created = () if self._num_events else (self._response("response.created"),)
        return self._events(*created, self._response("response.in_progress"))

    def gained(self, choice: Choice, choice_delta: ChoiceDelta) -> Iterable[bytes]:
        self._record.receive(choice_delta.scored)
        return chain.from_iterable([self._piece_events(piece) for piece in choice_delta.pieces])

    def _piece_events(self, piece: Piece) -> Iterable[bytes]:
        last = self._record.items[-1] if self._record.items else None
        added = self._record.add(piece)
        before = self._done(last) if added.is_new and last is not None else ()
        return chain(before, self._growth(added))

    def _growth(self, added: Added) -> Iterable[bytes]:
        opened = self._added(added.item) if added.is_new else ()
        return chain(opened, self._delta(added) if added.text or added.scored else ())

    def ending(self, choice: Choice) -> Iterable[bytes]:
        rest = self._growth(self._record.add_rest())
        self._record.finish(choice)
        done = self._done(self._record.items[-1])
        kind = "response.incomplete" if self._record.status == INCOMPLETE else "response.completed"
        return chain(rest, done, self._events(self._response(kind)))

    def last(self) -> bytes:
        return b""

    def failed(self, error: RequestError) -> bytes:
        self._record.fail(error)
        return b"".join(self._events(self._response("response.failed")))

    def _response(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "response": self._record.body()}

    def _added(self, item: Item) -> Iterable[bytes]:
        kind = "response.output_item.added"
        added = {"type": kind, "output_index": item.index, "item": item.fields(IN_PROGRESS)}
        if isinstance(item, CallItem):
            return self._events(added)
        empty: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if isinstance(item, ReasoningItem):
            empty = {"type": "reasoning_text", "text": ""}
        part = {"type": "response.content_part.added", "part": empty} | _content_place(item)
        return self._events(added, part)

    def _delta(self, added: Added) -> Iterable[bytes]:
        item, text = added.item, added.text
        if isinstance(item, CustomCallItem):
            return ()  # its input is known when the arguments are complete
        if isinstance(item, CallItem):
            return self._events({"type": "response.function_call_arguments.delta", "delta": text, **_item_place(item)})
        if isinstance(item, ReasoningItem):
            return self._events({"type": "response.reasoning_text.delta", "delta": text, **_content_place(item)})
        logprobs = item.logprobs(added.scored, in_event=True)
        kind = "response.output_text.delta"
        return self._events({"type": kind, "delta": text, "logprobs": logprobs, **_content_place(item)})

    def _done(self, item: Item) -> Iterable[bytes]:
        whole = item.text
        fields = item.fields(self._record.item_status(item))
        done = {"type": "response.output_item.done", "output_index": item.index, "item": fields}
        if isinstance(item, CustomCallItem):
            place, kind = _item_place(item), "response.custom_tool_call_input"
            delta = {"type": f"{kind}.delta", "delta": item.input, **place}
            return self._events(delta, {"type": f"{kind}.done", "input": item.input, **place}, done)
        if isinstance(item, CallItem):
            kind = "response.function_call_arguments.done"
            arguments = {"type": kind, "name": item.name, "arguments": whole, **_item_place(item)}
            return self._events(arguments, done)
        place = _content_place(item)
        part = {"type": "response.content_part.done", "part": item.part(), **place}
        if isinstance(item, ReasoningItem):
            return self._events({"type": "response.reasoning_text.done", "text": whole, **place}, part, done)
        logprobs = item.logprobs(item.scored, in_event=True)
        text = {"type": "response.output_text.done", "text": whole, "logprobs": logprobs, **place}
        return self._events(text, part, done)

    def _events(self, *events: dict[str, Any]) -> Iterable[bytes]:
        """Numbers the events now and encodes them later."""
        numbered = [event | {"sequence_number": number} for number, event in enumerate(events, self._num_events)]
        self._num_events += len(events)
        return chain.from_iterable(event_pieces(event, event["type"]) for event in numbered)


def _item_place(item: Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index}


def _content_place(item: Item) -> dict[str, Any]:
    return {**_item_place(item), "content_index": 0}
