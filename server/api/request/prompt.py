"""From a chat's messages to token ids: checks roles and contents, renders the template, and encodes the rendering."""

from __future__ import annotations

import msgspec

from server.api.request.limits import check_num_messages, check_text_length
from server.api.request.schemas import ChatRequest, Message, TokenizeRequest
from server.api.request.template import template_errors
from server.api.request.template_input import num_characters, template_messages, template_variables
from server.api.request.tools import Tools
from server.api.state import ServerState
from server.http.errors import invalid
from server.text.special_tokens import Part, encode_parts
from server.text.template_runner import Lane, ServedTemplate

CHARS_OF_A_MESSAGE = 40  # about the characters that a template adds to a message; an estimate of work


async def encode_chat(
    state: ServerState, body: ChatRequest | TokenizeRequest, template: ServedTemplate, tools: Tools | None = None
) -> list[int]:
    """The prompt's ids. Raises RequestError 400 for messages or variables that the template cannot render."""
    if not body.messages:
        raise invalid("messages", "must not be empty")
    check_num_messages(len(body.messages), state.client.info.max_model_len)
    most = CHARS_OF_A_MESSAGE * len(body.messages)
    size = await state.aside.run(most, lambda: sum(map(_size, body.messages or ())))
    messages = await state.aside.run(size, template_messages, body.messages)
    num_chars = await state.aside.run(size, lambda: sum(map(num_characters, messages)))
    check_text_length(num_chars, state.tokenizer, state.client.info.max_model_len)
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and generates:
        raise invalid("continue_final_message", "cannot be combined with `add_generation_prompt`")
    extra = await state.aside.run(_raw_size(body), template_variables, body, template)
    lane = Lane.SPECIAL if body.chat_template or extra.keys() - {"documents"} else Lane.ORDINARY
    if tools is not None:
        extra["tools"] = tools.for_template()
    max_chars = state.tokenizer.max_token_chars * state.client.info.max_model_len

    def render() -> tuple[int, list[Part]]:
        return template.render(
            max_chars,
            messages=messages,
            add_generation_prompt=generates,
            continue_final_message=continues,
            extra=extra,
        )

    costly = ("chat_template" if body.chat_template else "chat_template_kwargs") if lane is Lane.SPECIAL else "messages"
    with template_errors("messages", limits_param=costly):
        num_chars, parts = await state.templates.run(lane, render)
    check_text_length(num_chars, state.tokenizer, state.client.info.max_model_len)
    ids = await state.aside.run(num_chars, encode_parts, state.tokenizer, parts)
    return state.tokenizer.with_affixes(ids) if body.add_special_tokens else ids  # templates write their own


def _size(message: Message) -> int:
    """The size, in characters, of work on the message's parts. Text content does not count: it is not copied."""
    num_parts = len(message.content) if isinstance(message.content, list) else 1
    calls = [call.function.arguments for call in message.tool_calls or ()]
    return CHARS_OF_A_MESSAGE * (num_parts + len(calls)) + sum(len(text) for text in calls if isinstance(text, str))


def _raw_size(body: ChatRequest | TokenizeRequest) -> int:
    fields = (body.chat_template_kwargs, body.documents)
    return sum(len(field) for field in fields if field is not msgspec.UNSET)
