"""Translates a request of /v1/responses to a request of /v1/chat/completions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace
from starlette.datastructures import QueryParams

from server.api.request.body import read_raw
from server.api.request.conversation import LEFT_OUT_IN_WORDS, check_role
from server.api.request.schemas import ChatRequest, CommonFields, ContentPart, FunctionCall, Message, ToolCall
from server.api.request.tools import MAX_TOOLS_BYTES, function_tool, log_left_out, served_tools
from server.api.routes.responses.items import Item, NamespacedCall, seen_name
from server.api.routes.responses.schemas import (
    FunctionTool,
    InputItem,
    InputPart,
    KeptItem,
    ResponsesRequest,
    TextFormat,
)
from server.http.body import read_query
from server.http.encoding import encode_json
from server.http.request_error import RequestError, given, invalid, not_kept, unsupported

# chat's names -> the names of this route
_OTHER_NAMES = {"max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
# Items of tools that are not served, and of reasoning, which the template does not show.
LEFT_OUT = frozenset(
    "reasoning web_search_call file_search_call computer_call computer_call_output image_generation_call "
    "code_interpreter_call local_shell_call local_shell_call_output mcp_list_tools mcp_call tool_search_call "
    "tool_search_output".split()
)
CUSTOM_INPUT = "input"  # the one parameter of a custom tool
UNFINISHED = ("in_progress", "incomplete")
LOGPROBS = "message.output_text.logprobs"
HARMLESS_PARTS = ("reasoning.encrypted_content",)  # there is no reasoning
_PART_TYPES = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# fields with the same meaning in both routes
_SAME = (
    *CommonFields.__struct_fields__,
    *"parallel_tool_calls chat_template_kwargs documents include_reasoning thinking_token_budget".split(),
)

_CALLED = ("function", "custom")

_tools = msgspec.json.Decoder(list[FunctionTool] | None)
_kept_item = msgspec.json.Decoder(KeptItem).decode


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Replaces chat's field names in errors by this route's names."""
    try:
        yield
    except RequestError as error:
        if error.param in _OTHER_NAMES:
            own = _OTHER_NAMES[error.param]
            error.message = error.message.replace(error.param, own)
            error.param = own
        raise


@dataclass(frozen=True, slots=True)
class SeenTool:
    """A function or a custom tool, as the model sees it and as the client calls it."""

    function: FunctionTool  # as the model sees it
    name: str  # the client's
    namespace: str | None = None


def read_function_tools(body: ResponsesRequest, *, strict: bool) -> list[FunctionTool]:
    """The request's functions, custom tools, and namespaces of both. Other types of tools are left out; a `strict`
    server refuses them.

    Raises RequestError 400.
    """
    tools = read_raw("tools", body.tools, _tools, max_bytes=MAX_TOOLS_BYTES) or []
    left_out: set[str] = set()
    served = served_tools("tools", tools, (*_CALLED, "namespace"), left_out, strict=strict)
    for i, tool in enumerate(tools):
        if tool.type == "namespace":
            tool.tools = served_tools(f"tools.{i}.tools", tool.tools or [], _CALLED, left_out, strict=strict)
    log_left_out(left_out)
    return served


def seen_tools(tools: Iterable[FunctionTool]) -> list[SeenTool]:
    """The tools as the model sees them. Templates have no namespaces, so the names of a namespace's tools begin with
    the namespace's name, and the description of the first tool begins with the namespace's description."""
    seen = []
    for tool in tools:
        if tool.type != "namespace":
            seen.append(SeenTool(tool, tool.name or ""))
            continue
        description = tool.description
        for inner in tool.tools or ():
            texts = filter(None, (description, inner.description))
            description = None
            function = replace(inner, name=seen_name(inner.name or "", tool.name), description="\n".join(texts) or None)
            seen.append(SeenTool(function, inner.name or "", tool.name))
    return seen


def asks_for_logprobs(body: ResponsesRequest) -> bool:
    """Whether the request includes the log-probabilities of the text. Raises RequestError 400."""
    parts = _included(body.include or ())
    if body.top_logprobs and not parts:
        raise invalid("top_logprobs", f"is only allowed when `include` has {LOGPROBS}")
    return bool(parts)


def _included(parts: Sequence[str]) -> list[str]:
    included = [part for part in parts if part not in HARMLESS_PARTS]
    for part in included:
        if part != LOGPROBS:
            raise unsupported("include", f"the part `{part[:60]}` is")
    return included


def check_included(query: QueryParams) -> None:
    """Raises RequestError 400 if the query includes a part that no item has."""
    _included([*query.getlist("include"), *query.getlist("include[]")])


class _EventsQuery(msgspec.Struct):
    stream: bool = False
    starting_after: Annotated[int, msgspec.Meta(ge=0, lt=10**10)] | None = None


def first_event(query: QueryParams) -> int | None:
    """The number of the first event to send of a stored response; None: the response itself is requested. Raises
    RequestError 400."""
    check_included(query)
    asked = read_query(query, _EventsQuery)
    if asked.starting_after is None:
        return 0 if asked.stream else None
    if not asked.stream:
        raise invalid("starting_after", "is only allowed when `stream` is true")
    return asked.starting_after + 1


def chat_request(body: ResponsesRequest, tools: Sequence[SeenTool], messages: Sequence[Message]) -> ChatRequest:
    """The chat request for this request. `messages` are the conversation without the instructions. Raises RequestError
    400."""
    instructions = [] if body.instructions is None else [Message("system", body.instructions)]
    fields = {name: getattr(body, name) for name in _SAME}
    if body.truncation == "auto" and body.truncate_prompt_tokens is None:
        fields["truncate_prompt_tokens"] = -1  # the beginning of a prompt that is too long is cut off
    return ChatRequest(
        messages=[*instructions, *messages],
        continue_final_message=_continues(body.input),
        max_completion_tokens=body.max_output_tokens,
        logprobs=asks_for_logprobs(body),
        top_logprobs=body.top_logprobs or None,
        tools=_chat_tools(body, tools),
        tool_choice=_tool_choice(body.tool_choice, has_tools=body.tools is not msgspec.UNSET),
        response_format=_response_format(body.text.format if body.text else None),
        **fields,
    )


def _continues(items: str | list[InputItem]) -> bool:
    """Whether the last item is a message of the assistant that is not complete. As in vLLM, the answer continues it."""
    if isinstance(items, str) or not items:
        return False
    last = items[-1]
    return (last.type or "message", last.role) == ("message", "assistant") and last.status in UNFINISHED


def _chat_tools(body: ResponsesRequest, tools: Sequence[SeenTool]) -> msgspec.Raw | msgspec.UnsetType:
    """The tools in chat's form. An empty list stays one, because every `tool_choice` is valid with it."""
    if body.tools is msgspec.UNSET:
        return msgspec.UNSET
    return msgspec.Raw(msgspec.json.encode([_chat_tool(tool.function) for tool in tools]))


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    parameters = _input_schema(tool.format or {}) if tool.type == "custom" else tool.parameters
    return function_tool(tool.name, tool.description, parameters, tool.strict)


def _input_schema(form: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a custom tool: one text. A regular expression constrains it, and the model is told of a Lark
    grammar."""
    text = {"type": "string"}
    match form:
        case {"type": "grammar", "syntax": "regex", "definition": str(pattern)}:
            text["pattern"] = f"^(?:{pattern})$"
        case {"type": "grammar", "syntax": "lark", "definition": str(grammar)}:
            text["description"] = f"A text of this Lark grammar:\n{grammar}"
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


def _response_format(text_format: TextFormat | None) -> msgspec.Raw | msgspec.UnsetType:
    """The format in chat's form, where the schema is one level deeper."""
    if text_format is None:
        return msgspec.UNSET
    fields = format_fields(text_format)
    kind = fields.pop("type")
    schema = {"json_schema": fields} if kind == "json_schema" else fields
    return msgspec.Raw(msgspec.json.encode({"type": kind, **schema}))


def format_fields(text_format: TextFormat) -> dict[str, Any]:
    """The fields of a format that were given."""
    return {name: value for name, value in msgspec.structs.asdict(text_format).items() if value is not None}


def _tool_choice(choice: str | Mapping[str, Any] | None, *, has_tools: bool) -> str | dict[str, Any] | None:
    match choice:
        case "auto" if not has_tools:  # allowed in this route
            return None
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(_named_tool, tools)]}}
        case Mapping():
            return dict(_named_tool(choice))
    return choice


def _named_tool(tool: Any) -> Any:
    """A tool that a choice names, in chat's form. Other values are returned unchanged, and chat refuses them."""
    match tool:
        case {"type": "function" | "custom", "name": name}:
            return {"type": "function", "function": {"name": seen_name(name, tool.get("namespace"))}}
    return tool


def _is_reference(item: InputItem) -> bool:
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


def item_messages(
    items: str | Sequence[InputItem], param: str, find: Callable[[Iterable[str]], Mapping[str, Item]], *, strict: bool
) -> list[Message]:
    """A message for each item. Items that only OpenAI's models read, such as reasoning, are left out.

    Args:
        param: the name of the field.
        find: returns the kept items with these ids.
        strict: whether items that are not supported are refused and not left out.

    Raises:
        RequestError: 400, or 404 for an item that is not kept.
    """
    if isinstance(items, str):
        return [Message("user", items)]
    kept = find([item.id for item in items if item.id is not None and _is_reference(item)])
    messages: list[Message] = []
    for i, item in enumerate(items):
        if _is_reference(item):
            id = given(f"{param}.{i}.id", item.id)
            if id not in kept:
                raise not_kept("Item", id, f"{param}.{i}.id")
            messages += kept_messages([kept[id]])
        elif item.type not in LEFT_OUT or (strict and item.type != "reasoning"):
            messages.append(_message(f"{param}.{i}", item))
    return messages


def kept_messages(items: Iterable[Item]) -> Iterator[Message]:
    """The messages of kept items that the template shows. Items of one answer may be calls of one message: `joined`
    joins them."""
    for item in map(_kept_item, (item.fields for item in items)):
        if item.type not in LEFT_OUT:
            yield _message("", item)


def _message(where: str, item: InputItem) -> Message:
    kind = item.type or "message"
    match kind:
        case "message":
            role = given(f"{where}.role", item.role)
            check_role(f"{where}.role", role)
            return Message(role, _content(f"{where}.content", item.content))
        case "function_call" | "custom_tool_call":
            if kind == "function_call":
                arguments = given(f"{where}.arguments", item.arguments)
            else:
                arguments = encode_json({CUSTOM_INPUT: given(f"{where}.input", item.input)}).decode()
            name, id = given(f"{where}.name", item.name), given(f"{where}.call_id", item.call_id)
            function = FunctionCall(name, arguments)
            if item.namespace is not None:
                seen = seen_name(name, item.namespace)
                function = NamespacedCall(seen, arguments, namespace=item.namespace)
            return Message("assistant", tool_calls=[ToolCall(function, id)])
        case "function_call_output" | "custom_tool_call_output":
            id = given(f"{where}.call_id", item.call_id)
            given(f"{where}.output", item.output)
            output = [*map(_readable, item.output)] if isinstance(item.output, list) else item.output
            return Message("tool", _content(f"{where}.output", output), tool_call_id=id)
    raise unsupported(f"{where}.type", f"items of the type `{kind[:40]}` are")


def _readable(part: InputPart) -> InputPart:
    """A part of a tool's output. A note replaces a part that is not text, because the other parts may be enough."""
    return part if part.type in _PART_TYPES else InputPart("text", LEFT_OUT_IN_WORDS.format(part.type))


def _content(where: str, content: str | list[InputPart] | None) -> str | list[ContentPart] | None:
    if not isinstance(content, list):
        return content
    parts = []
    for i, part in enumerate(content):
        if part.type not in _PART_TYPES:
            raise unsupported(f"{where}.{i}", f"content of the type `{part.type[:40]}` is")
        kind = _PART_TYPES[part.type]
        given(f"{where}.{i}.{kind}", part.refusal if kind == "refusal" else part.text)
        parts.append(ContentPart(kind, part.text, part.refusal))
    return parts
