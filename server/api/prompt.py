"""A chat's messages to token ids: roles and contents checked, the template rendered, the rendering encoded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from server.api.aside import LONG_WORK
from server.api.limits import check_num_messages, check_text_length
from server.api.schemas import ChatRequest, Message, TokenizeRequest, template_variables
from server.api.state import ServerState
from server.http.errors import RequestError, invalid, unsupported
from server.text.chat_template import TemplateError
from server.text.special_tokens import encode_parts
from server.text.time_limit import Overtime, time_limit

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
UNSUPPORTED_ROLES = ("tool", "function")
CHARS_OF_A_MESSAGE = 40  # about what a template writes around one, to tell long work from short
RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


async def encode_chat(state: ServerState, body: ChatRequest | TokenizeRequest) -> list[int]:
    """The prompt's ids. Raises RequestError 400 for whatever the template cannot take."""
    template = state.chat_template
    if template is None:
        raise RequestError(400, "This model has no chat template: use /v1/completions.")
    if not body.messages:
        raise invalid("messages", "must not be empty")
    check_num_messages(len(body.messages), state.client.info.max_model_len)
    num_parts = sum(len(message.content) if isinstance(message.content, list) else 1 for message in body.messages)
    messages = await state.aside.run(CHARS_OF_A_MESSAGE * num_parts, template_messages, body.messages)
    num_chars = sum(len(message["content"]) for message in messages)
    check_text_length(num_chars, state.tokenizer, state.client.info.max_model_len)
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and generates:
        raise invalid("continue_final_message", "cannot be combined with `add_generation_prompt`")
    extra = template_variables(body) if isinstance(body, ChatRequest) else {}
    reserved = RESERVED_VARIABLES.intersection(extra)
    if reserved:
        raise invalid("chat_template_kwargs", f"must not set {', '.join(sorted(reserved))}")

    def render_and_encode() -> list[int]:
        with time_limit(limit_s) if is_long else contextlib.nullcontext():
            parts = template.render(
                messages, add_generation_prompt=generates, continue_final_message=continues, extra=extra
            )
        return encode_parts(state.tokenizer, parts)

    # what a template does with its variables cannot be told from their size: it may count up to one
    size = LONG_WORK if extra else num_chars + CHARS_OF_A_MESSAGE * len(messages)
    is_long, limit_s = size >= LONG_WORK, state.settings.template_timeout_s
    try:
        return await state.aside.run(size, render_and_encode)
    except TemplateError as error:
        raise RequestError(400, str(error), param="messages") from error
    except Overtime as error:
        message = f"The chat template took longer than {limit_s:g} s for this conversation and was stopped."
        raise RequestError(400, message, param="chat_template_kwargs" if extra else "messages") from error
    except RecursionError as error:
        raise invalid("chat_template_kwargs", "is nested too deeply") from error


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [template_message(i, message) for i, message in enumerate(messages)]


def template_message(index: int, message: Message) -> dict[str, Any]:
    """A message as templates know it: a role of theirs, and its content as one string.

    Llama 3 knows no developer: OpenAI's newer name for system. Text parts are joined by line feeds.
    """
    where = f"messages.{index}"
    if message.role in UNSUPPORTED_ROLES:
        raise unsupported(f"{where}.role", f"messages of the role `{message.role}` are")
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise invalid(f"{where}.role", f"must be one of {known}, got {message.role[:40]!r}")
    if message.tool_calls or message.function_call:
        raise unsupported(f"{where}.tool_calls", "tool calls are")
    if isinstance(message.content, str):
        text = message.content
    elif message.content is None:
        if message.role != "assistant":
            raise invalid(f"{where}.content", "must be a string or a list of text parts")
        text = ""
    else:
        for i, part in enumerate(message.content):
            if part.type != "text":
                raise unsupported(f"{where}.content.{i}", f"content of the type `{part.type[:40]}` is")
            if part.text is None:
                raise invalid(f"{where}.content.{i}.text", "is missing")
        text = "\n".join(part.text or "" for part in message.content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": ROLES[message.role], "content": text, **named}
