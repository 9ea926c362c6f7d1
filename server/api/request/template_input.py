"""The input of a chat template: messages in the form that templates expect, and further variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from server.api.request.raw_json import RawField, is_deeper_than, read_raw
from server.api.request.schemas import ChatRequest, ContentPart, FunctionCall, Message, TokenizeRequest
from server.api.request.tools import MAX_DEPTH
from server.http.errors import RequestError, invalid, unsupported
from server.text.template_runner import ServedTemplate

# Llama 3 has no role `developer`, which is OpenAI's newer name for `system`. `function` is OpenAI's older name for
# `tool`. All other roles go to the template as they are.
TEMPLATE_NAMES = {"developer": "system", "function": "tool"}
MAX_ROLE_CHARS = 64
MAY_BE_EMPTY = ("assistant", "tool", "ipython")  # roles whose content may be null
MAX_VARIABLES_BYTES = 64 * 1024  # the template reads every string of them, several times
MAX_DOCUMENTS_BYTES = 2 * 2**20
RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})

_variables = msgspec.json.Decoder(dict[str, Any] | None)
_documents = msgspec.json.Decoder(list[dict[str, Any]] | None)


def template_variables(body: ChatRequest | TokenizeRequest, template: ServedTemplate) -> dict[str, Any]:
    """`chat_template_kwargs` and `documents`. Raises RequestError 400 if they are not valid for the template."""
    variables = read_raw("chat_template_kwargs", body.chat_template_kwargs, _variables, max_bytes=MAX_VARIABLES_BYTES)
    reserved = RESERVED_VARIABLES.intersection(variables or ())
    if reserved:
        raise invalid("chat_template_kwargs", f"must not set {', '.join(sorted(reserved))}")
    documents = _read_documents(body.documents, template)
    return (variables or {}) | ({"documents": documents} if documents else {})


def _read_documents(raw: RawField, template: ServedTemplate) -> list[dict[str, Any]] | None:
    documents = read_raw("documents", raw, _documents, max_bytes=MAX_DOCUMENTS_BYTES)
    if documents and not template.reads("documents"):
        raise RequestError(400, "documents: this model's chat template does not show them.", param="documents")
    if is_deeper_than(MAX_DEPTH, documents):
        raise invalid("documents", f"are nested more than {MAX_DEPTH} deep")
    return documents


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """All messages in the form that templates expect."""
    return [template_message(i, message) for i, message in enumerate(messages)]


def template_message(index: int, message: Message) -> dict[str, Any]:
    """A message in the form that templates expect. Its content is one string, and the
    arguments of its tool calls are objects.

    Text parts are joined by line feeds. Raises RequestError 400.
    """
    where = f"messages.{index}"
    check_role(f"{where}.role", message.role)
    role = TEMPLATE_NAMES.get(message.role, message.role)
    fields: dict[str, Any] = {"role": role, "content": _content(where, role, message)}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    calls = _tool_calls(message)
    if calls and role != "assistant":
        raise invalid(f"{where}.tool_calls", "are only allowed in messages of the assistant")
    return fields | ({"tool_calls": calls} if calls else {})


def check_role(param: str, role: str) -> None:
    """Raises RequestError 400 for a role that no template has."""
    if not 0 < len(role) <= MAX_ROLE_CHARS:
        raise invalid(param, f"must have 1 to {MAX_ROLE_CHARS} characters, got {len(role)}")


def content_text(message: Message) -> str:
    """The text of a message that `template_message` accepts."""
    return _content("", TEMPLATE_NAMES.get(message.role, message.role), message)


def num_characters(message: dict[str, Any]) -> int:
    """The approximate number of characters that the message adds to a prompt."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return len(message["content"]) + sum(len(call["name"]) + _size(call["arguments"]) for call in calls)


def _size(arguments: Any) -> int:
    return len(arguments) if isinstance(arguments, str) else len(msgspec.json.encode(arguments))


def _content(where: str, role: str, message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if role not in MAY_BE_EMPTY:
            raise invalid(f"{where}.content", "must be a string or a list of text parts")
        return message.refusal or ""
    return "\n".join(_part_text(f"{where}.content.{i}", part) for i, part in enumerate(message.content))


def _part_text(where: str, part: ContentPart) -> str:
    if part.type not in ("text", "refusal"):
        raise unsupported(where, f"content of the type `{part.type[:40]}` is")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise invalid(f"{where}.{part.type}", "is missing")
    return text


def _tool_calls(message: Message) -> list[dict[str, Any]]:
    calls = [
        {"id": call.id or "", "type": "function", "function": _function(call.function)}
        for call in message.tool_calls or ()
    ]
    if message.function_call is not None:
        calls.append({"id": "", "type": "function", "function": _function(message.function_call)})
    return calls


def _function(call: FunctionCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": _arguments(call.arguments)}


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    """The arguments as an object, which templates print as JSON. Text that is not a JSON object stays a string."""
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return arguments
    if value is None:
        return {}
    if not isinstance(value, dict) or is_deeper_than(MAX_DEPTH, value):
        return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return value
