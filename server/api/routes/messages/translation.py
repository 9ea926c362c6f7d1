"""Translates a request of /v1/messages to a request of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from server.api.request.body import read_raw
from server.api.request.conversation import LEFT_OUT_IN_WORDS
from server.api.request.schemas import ChatRequest, FunctionCall, Message, ToolCall
from server.api.request.tools import MAX_TOOLS_BYTES, function_tool, log_left_out, served_tools
from server.api.routes.messages.schemas import (
    Block,
    CountRequest,
    InputMessage,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    Source,
)
from server.http.request_error import given, invalid, unsupported

_tools = msgspec.json.Decoder(list[MessageTool] | None)
# Claude Code's first block. Its value changes with each request, so no cached prefix would be found after it.
BILLING = "x-anthropic-billing-header:"
# Fields of a chat completion that have the same name and meaning.
_SAME = "stream temperature top_p top_k seed ignore_eos cache_salt priority timeout_s service_tier slo".split()
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: CountRequest, *, strict: bool) -> ChatRequest:
    """The chat request for a request of the Messages API. Raises RequestError 400. A `strict` server refuses tools that
    others leave out.

    If the last message is the assistant's, the answer continues it. An empty last message is left out.
    """
    system = [] if body.system is None else [Message("system", _system(body.system))]
    turns = [message for i, turn in enumerate(body.messages) for message in _messages(f"messages.{i}", turn)]
    continues = bool(turns) and turns[-1].role == "assistant"
    if continues:
        _check_beginning(body, turns[-1])
        if not turns[-1].content:
            turns.pop()
            continues = False
    parallel = None if body.tool_choice is None else not body.tool_choice.disable_parallel_tool_use
    chat = ChatRequest(
        model=body.model,
        messages=system + turns,
        continue_final_message=continues,
        tools=_chat_tools(body, strict=strict),
        tool_choice=_chat_tool_choice(body.tool_choice),
        parallel_tool_calls=parallel,
        response_format=_response_format(body),
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
        for name in _SAME:
            setattr(chat, name, getattr(body, name))
        chat.stop = body.stop_sequences
        if body.thinking is not None:
            chat.include_reasoning = body.thinking.type != "disabled"
            chat.thinking_token_budget = body.thinking.budget_tokens
    return chat


def _check_beginning(body: CountRequest, last: Message) -> None:
    """Checks the beginning of the answer, which is the last message, by Anthropic's rules. Raises RequestError 400."""
    where = f"messages.{len(body.messages) - 1}.content"
    if last.tool_calls:
        raise invalid(where, "ends with `tool_use`: a message with its `tool_result` must follow")
    if isinstance(last.content, str) and last.content[-1:].isspace():
        raise invalid(where, "final assistant content cannot end with trailing whitespace")
    if last.content and body.output_config is not None and body.output_config.format is not None:
        raise invalid(
            "output_config.format", "cannot be combined with a last message of the assistant, which is continued"
        )


def _response_format(body: CountRequest) -> msgspec.Raw | msgspec.UnsetType:
    text_format = None if body.output_config is None else body.output_config.format
    if text_format is None:
        return msgspec.UNSET
    if text_format.type != "json_schema" or text_format.schema is None:
        raise invalid("output_config.format", 'must be {"type": "json_schema", "schema": ...}')
    schema = {"type": "json_schema", "json_schema": {"schema": text_format.schema}}
    return msgspec.Raw(msgspec.json.encode(schema))


def _messages(where: str, turn: InputMessage) -> Iterable[Message]:
    """The messages of one turn. Tool results come before the turn's text, because they must follow the calls."""
    if turn.role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role", f"must be user or assistant, got {turn.role[:40]!r}")
    if isinstance(turn.content, str):
        yield Message(turn.role, turn.content)
        return
    where = f"{where}.content"
    texts, calls, results = [], [], []
    for i, block in enumerate(turn.content):
        match block.type:
            case "tool_use":
                calls.append(_call(f"{where}.{i}", block))
            case "thinking" | "redacted_thinking":
                continue  # templates do not show the reasoning of earlier answers
            case "tool_result":
                results.append(Message("tool", _result(f"{where}.{i}", block), tool_call_id=block.tool_use_id))
            case _:
                texts.append(_block_text(f"{where}.{i}", block))
    yield from results
    if texts or not (calls or results):
        yield Message(turn.role, "\n".join(texts))
    if calls:
        yield Message(turn.role, tool_calls=calls)


def _call(where: str, block: Block) -> ToolCall:
    return ToolCall(FunctionCall(given(f"{where}.name", block.name), block.input or {}), block.id)


def _system(content: str | list[Block]) -> str:
    if isinstance(content, str):
        return content
    texts = (_block_text(f"system.{i}", block) for i, block in enumerate(content))
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def _result(where: str, block: Block) -> str:
    content = block.content or ""
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(f"{where}.content.{i}", part, is_result=True) for i, part in enumerate(content))


def _block_text(where: str, block: Block, *, is_result: bool = False) -> str:
    """The text of a block for the template. Raises RequestError 400 for a block without text.

    The text of a document has its title, its context and its text, line by line. That of a search result has its title,
    its source and its texts. That of a reference to a tool is the tool's name.

    Args:
        is_result: whether the block is the result of a tool. A note then replaces parts that are not text.
    """
    source = given(f"{where}.source", block.source) if block.type == "document" else block.source
    match block.type:
        case "text":
            return given(f"{where}.text", block.text)
        case "tool_reference":
            return given(f"{where}.tool_name", block.tool_name)
        case "search_result":
            texts = _inner_texts(f"{where}.content", block.content, is_result=is_result)
            return _lines(block.title, source if isinstance(source, str) else None, *texts)
        case "document" if isinstance(source, Source) and source.type == "text":
            return _lines(block.title, block.context, given(f"{where}.source.data", source.data))
        case "document" if isinstance(source, Source) and source.type == "content":
            texts = _inner_texts(f"{where}.source.content", source.content, is_result=is_result)
            return _lines(block.title, block.context, *texts)
    return _left_out(where, block, is_result=is_result)


def _inner_texts(where: str, content: str | list[Block] | None, *, is_result: bool) -> Iterable[str]:
    """The texts in a document or a search result, which has no documents in it."""
    if content is None:
        raise invalid(where, "is missing")
    if isinstance(content, str):
        return [content]
    return (
        given(f"{where}.{i}.text", block.text)
        if block.type == "text"
        else _left_out(f"{where}.{i}", block, is_result=is_result)
        for i, block in enumerate(content)
    )


def _left_out(where: str, block: Block, *, is_result: bool) -> str:
    if is_result:
        return LEFT_OUT_IN_WORDS.format(block.type)
    place = f" from `{block.source.type[:40]}`" if isinstance(block.source, Source) else ""
    raise unsupported(where, f"content of the type `{block.type[:40]}`{place} is")


def _lines(*parts: str | None) -> str:
    return "\n".join(part for part in parts if part)


def _chat_tools(body: CountRequest, *, strict: bool) -> msgspec.Raw | msgspec.UnsetType:
    """The tools in chat's form. Tools that Anthropic's server runs, or whose parameters only its models know, are left
    out."""
    tools = read_raw("tools", body.tools, _tools, max_bytes=MAX_TOOLS_BYTES)
    if not tools:
        return msgspec.UNSET
    left_out: set[str] = set()
    served = served_tools("tools", tools, (None, "custom"), left_out, strict=strict)
    log_left_out(left_out)
    chat_tools = [function_tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in served]
    return msgspec.Raw(msgspec.json.encode(chat_tools))


def _chat_tool_choice(choice: MessageToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    if choice.type not in _CHOICES:
        raise invalid("tool_choice.type", f"must be auto, any, tool or none, got {choice.type[:40]!r}")
    return _CHOICES[choice.type]
