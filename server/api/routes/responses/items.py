"""Items, which are the parts of an input or of a conversation in the API, and the pages of their lists."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import msgspec

from server.api.request.kept_objects import ListQuery, list_object
from server.api.request.schemas import ContentPart, FunctionCall, Message
from server.http.encoding import json_pieces
from server.http.request_error import invalid

RESPONSE_PREFIX = "resp-"  # of a response's id
INCOMPLETE = "incomplete"  # the status of an item that was cut
CALLS = ("function_call", "custom_tool_call")


class NamespacedCall(FunctionCall, kw_only=True):
    """A call of a tool of a namespace. Its name is the one that the model sees."""

    namespace: str

    @property
    def own_name(self) -> str:
        """The tool's name in its namespace."""
        return self.name.removeprefix(seen_name("", self.namespace))


def seen_name(name: str, namespace: str | None) -> str:
    """The name of a tool that the model sees."""
    return name if namespace is None else f"{namespace}__{name}"


class Item(NamedTuple):
    """An item with its JSON object, as it is kept."""

    id: str
    fields: bytes


class _ItemFields(msgspec.Struct):
    id: str
    type: str
    status: str = ""


class ResponseFields(msgspec.Struct):
    """The fields of a response's JSON that are read again."""

    status: str
    background: bool
    output: list[msgspec.Raw]


_item_fields = msgspec.json.Decoder(_ItemFields).decode
response_fields = msgspec.json.Decoder(ResponseFields).decode


def _items(raw: Iterable[msgspec.Raw]) -> list[Item]:
    return [Item(_item_fields(fields).id, bytes(fields)) for fields in raw]


def items_of(array: bytes) -> list[Item]:
    """The items of a JSON array."""
    return _items(msgspec.json.decode(array, type=list[msgspec.Raw]))


def array_of(items: Iterable[Item]) -> bytes:
    """The items as a JSON array."""
    return b"[%b]" % b",".join(item.fields for item in items)


def output_items(response: bytes) -> list[Item]:
    """The items of the answer in a response's JSON. A call that was cut is left out: it cannot have a result."""
    items = _items(response_fields(response).output)
    if items:
        last = _item_fields(items[-1].fields)
        if last.type in CALLS and last.status == INCOMPLETE:
            items.pop()
    return items


def item_id(prefix: str, response_id: str, number: int) -> str:
    """The id of an item of a response."""
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)}_{number}"


def response_of_item(id: str) -> str:
    """The id of the response to which an item belongs. For other ids the result is no response's id."""
    return RESPONSE_PREFIX + id.partition("_")[2].rpartition("_")[0]


def input_items(messages: Iterable[Message], ids: Callable[[int], str]) -> list[Item]:
    """The messages as items. `ids` gives the id of each by its number."""
    numbered = ((ids(number), message) for number, message in enumerate(one_by_one(messages)))
    return [Item(id, b"".join(json_pieces(_input_item(id, message)))) for id, message in numbered]


def new_items(messages: Iterable[Message]) -> list[Item]:
    """The messages as items with new ids."""
    return input_items(messages, lambda number: f"item_{uuid.uuid4().hex}")


def one_by_one(messages: Iterable[Message]) -> Iterator[Message]:
    """Splits messages into one message for each item. Each has at most one call."""
    for message in messages:
        calls = message.tool_calls or ()
        if message.content or not calls:
            yield message if not calls else Message(message.role, message.content)
        for call in calls:
            yield Message(message.role, tool_calls=[call])


def joined(messages: Iterable[Message]) -> list[Message]:
    """The messages of items, with consecutive calls in one message."""
    found: list[Message] = []
    for has_calls, group in groupby(messages, key=lambda message: bool(message.tool_calls)):
        of_kind = list(group)
        if has_calls:
            calls = [call for message in of_kind for call in message.tool_calls or ()]
            of_kind = [Message(of_kind[0].role, of_kind[0].content, tool_calls=calls)]
        found += of_kind
    return found


def items_page(items: Sequence[Item], query: ListQuery) -> dict[str, Any]:
    """The list object of one page, for `json_pieces`.

    Args:
        items: all items, the oldest first.

    Raises:
        RequestError: 400 if there is no item with the id `after`.
    """
    rest = iter(items if query.order == "asc" else reversed(items))
    if query.after is not None and not any(item.id == query.after for item in rest):
        raise invalid("after", f"there is no item with the id {query.after[:100]!r}")
    shown = list(islice(rest, query.limit))
    return items_list(shown, has_more=next(rest, None) is not None)


def items_list(items: Sequence[Item], *, has_more: bool = False) -> dict[str, Any]:
    """The list object of these items."""
    return list_object([item.id for item in items], (msgspec.Raw(item.fields) for item in items), has_more=has_more)


def _input_item(id: str, message: Message) -> dict[str, Any]:
    """The JSON object of an item of an input."""
    fields: dict[str, Any]
    if message.tool_calls:
        (call,) = message.tool_calls
        function = call.function
        arguments = function.arguments if isinstance(function.arguments, str) else "{}"
        fields = {"type": "function_call", "call_id": call.id, "name": function.name, "arguments": arguments}
        if isinstance(function, NamespacedCall):
            fields |= {"name": function.own_name, "namespace": function.namespace}
    elif message.role == "tool":
        output = "".join(_texts(message))
        fields = {"type": "function_call_output", "call_id": message.tool_call_id, "output": output}
    else:
        fields = {"type": "message", "role": message.role, "content": [*_parts(message)]}
    return {"id": id, "status": "completed", **fields}


def _parts(message: Message) -> Iterator[dict[str, Any]]:
    for text in _texts(message):
        if message.role == "assistant":
            yield {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        else:
            yield {"type": "input_text", "text": text}


def _texts(message: Message) -> Iterator[str]:
    if isinstance(message.content, str):
        yield message.content
    for part in message.content or ():
        if isinstance(part, ContentPart):
            yield (part.text if part.type == "text" else part.refusal) or ""
