"""Items, which are the parts of an input or of a conversation in the API, and the pages of their lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from sys import getsizeof
from typing import Any

from server.api.request.kept_objects import is_ascending, list_object, page_size
from server.api.request.schemas import ContentPart, FunctionCall, Message, ToolCall
from server.http.encoding import LongText
from server.http.request_error import invalid

MAX_SHOWN = 100  # items on a page
DEFAULT_SHOWN = 20
CHARS_OF_AN_ITEM = 40  # the work on an item equals that on a text of this length
BYTES_OF_A_MESSAGE = 300  # in memory, without its texts


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


@dataclass(frozen=True, slots=True)
class KeptItem:
    """An item that is kept.

    Args:
        message: the message that the template shows, with at most one call; None: it shows nothing.
        num_bytes: its size in memory, approximately.
        own_fields: its JSON object; None: it follows from the message.
    """

    id: str
    message: Message | None
    num_bytes: int
    own_fields: Callable[[], dict[str, Any]] | None = None

    def fields(self) -> dict[str, Any]:
        """Its JSON object, which may hold long texts."""
        if self.own_fields is not None:
            return self.own_fields()
        assert self.message is not None, "an item without a message has fields of its own"
        return input_item(self.id, self.message)


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
    of_own: list[ToolCall] | None = None  # the calls of the last message, which is then not the caller's
    for message in messages:
        if not message.tool_calls:
            of_own = None
            found.append(message)
        elif of_own is not None:
            of_own += message.tool_calls
        else:
            of_own = [*message.tool_calls]
            found.append(Message(message.role, message.content, tool_calls=of_own))
    return found


def message_size(message: Message) -> int:
    """The message's size in memory, approximately."""
    parts = [message.content] if isinstance(message.content, str) else [part.text for part in message.content or ()]
    calls = [call.function.arguments for call in message.tool_calls or ()]
    return BYTES_OF_A_MESSAGE + sum(getsizeof(text) for text in (*parts, *calls) if isinstance(text, str))


def items_page(items: Sequence[KeptItem], query: Mapping[str, str]) -> dict[str, Any]:
    """The list object of one page, as JSON that may hold long texts.

    Args:
        items: all items, the oldest first.
        query: `limit`, `order` (`desc`: newest first, the default) and `after`, the id of an item.

    Raises:
        RequestError: 400 for a parameter with an invalid value.
    """
    rest = iter(items if is_ascending(query) else reversed(items))
    if "after" in query and not any(item.id == query["after"] for item in rest):
        raise invalid("after", f"there is no item with the id {query['after'][:100]!r}")
    shown = list(islice(rest, page_size(query, most=MAX_SHOWN, default=DEFAULT_SHOWN)))
    return items_list(shown, has_more=next(rest, None) is not None)


def items_list(items: Sequence[KeptItem], *, has_more: bool = False) -> dict[str, Any]:
    """The list object of these items."""
    return list_object([item.id for item in items], (item.fields() for item in items), has_more=has_more)


def input_item(id: str, message: Message) -> dict[str, Any]:
    """The JSON object of an item of an input."""
    fields: dict[str, Any]
    if message.tool_calls:
        (call,) = message.tool_calls
        function = call.function
        arguments = LongText(function.arguments) if isinstance(function.arguments, str) else "{}"
        fields = {"type": "function_call", "call_id": call.id, "name": function.name, "arguments": arguments}
        if isinstance(function, NamespacedCall):
            fields |= {"name": function.own_name, "namespace": function.namespace}
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
