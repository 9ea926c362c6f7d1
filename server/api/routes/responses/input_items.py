"""The input of a response as a list of items, page by page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from server.api.request.kept_objects import is_ascending, page_size
from server.api.request.schemas import ContentPart, Message, ToolCall
from server.http.encoding import LongText, NestedList
from server.http.request_error import invalid

MAX_ITEMS = 100  # of one page
DEFAULT_ITEMS = 20

Source = tuple[Message, ToolCall | None]  # a message, or one call of it


def items_page(response_id: str, messages: Sequence[Message], query: Mapping[str, str]) -> dict[str, Any]:
    """The list object of one page, as JSON that may hold long texts.

    Args:
        messages: the conversation that the response answers, without the instructions.
        query: `limit`, `order` (`desc`: newest first, the default) and `after`, the id of an item.

    Raises:
        RequestError: 400 for a parameter with an invalid value.
    """
    sources = list(_sources(messages))
    prefix = f"item_{response_id.rpartition('-')[2]}"
    numbers = range(len(sources)) if is_ascending(query) else range(len(sources) - 1, -1, -1)
    if "after" in query:
        ids = [f"{prefix}_{number}" for number in numbers]
        if query["after"] not in ids:
            raise invalid("after", f"there is no item with the id {query['after'][:100]!r}")
        numbers = numbers[ids.index(query["after"]) + 1 :]
    shown = list(islice(numbers, page_size(query, most=MAX_ITEMS, default=DEFAULT_ITEMS)))
    return {
        "object": "list",
        "data": NestedList(_item(f"{prefix}_{number}", *sources[number]) for number in shown),
        "first_id": f"{prefix}_{shown[0]}" if shown else None,
        "last_id": f"{prefix}_{shown[-1]}" if shown else None,
        "has_more": len(shown) < len(numbers),
    }


def _sources(messages: Sequence[Message]) -> Iterator[Source]:
    for message in messages:
        calls = message.tool_calls or ()
        if message.content or not calls:
            yield message, None
        for call in calls:
            yield message, call


def _item(id: str, message: Message, call: ToolCall | None) -> dict[str, Any]:
    fields: dict[str, Any]
    if call is not None:
        function = call.function
        arguments = LongText(function.arguments) if isinstance(function.arguments, str) else "{}"
        fields = {"type": "function_call", "call_id": call.id, "name": function.name, "arguments": arguments}
    elif message.role == "tool":
        output = LongText("".join(_texts(message)))
        fields = {"type": "function_call_output", "call_id": message.tool_call_id, "output": output}
    else:
        fields = {"type": "message", "role": message.role, "content": [*_parts(message)]}
    return {"id": id, "status": "completed", **fields}


def _parts(message: Message) -> Iterator[dict[str, Any]]:
    for text in _texts(message):
        if message.role == "assistant":
            yield {"type": "output_text", "text": LongText(text), "annotations": [], "logprobs": []}
        else:
            yield {"type": "input_text", "text": LongText(text)}


def _texts(message: Message) -> Iterator[str]:
    if isinstance(message.content, str):
        yield message.content
    for part in message.content or ():
        if isinstance(part, ContentPart):
            yield (part.text if part.type == "text" else part.refusal) or ""
