"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.answer import GenerationAnswer
from server.chat_template import Part, TemplateError
from server.chat_writer import ChatOptions, ChatWriter
from server.errors import RequestError, invalid, unsupported
from server.lengths import check_counts, check_text_length, output_limit
from server.request_body import read_body
from server.sampling import check_sampling, check_top_logprobs
from server.schemas import ChatRequest, Message, TokenizeRequest, refuse_unsupported
from server.state import ServerState
from server.submission import check_min_tokens, check_streaming, new_id, start_generation

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
UNSUPPORTED_ROLES = ("tool", "function")


class ChatRoute:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._decoder = msgspec.json.Decoder(ChatRequest)

    async def __call__(self, request: Request) -> Response:
        state, settings = self._state, self._state.settings
        body = await read_body(request, self._decoder, settings.max_body_bytes)
        model = state.check_model(body.model)
        refuse_unsupported(body)
        check_sampling(body, vocab_size=state.client.info.vocab_size)
        include_usage, continuous_usage = check_streaming(body)
        top_logprobs = _top_logprobs(body)
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        check_counts(asked, body.min_tokens, param=param)

        prompt = await state.encode(render_chat(state, body))
        limit = output_limit(len(prompt), asked, state.client.info.max_model_len, param=param)
        check_min_tokens(body, limit)
        generation = start_generation(
            state,
            body,
            [prompt],
            [limit],
            request_id=new_id("chatcmpl"),
            logprobs=top_logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )
        options = ChatOptions(
            model=model,
            created=int(time.time()),
            prompt=prompt,
            top_logprobs=top_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            include_usage=include_usage or settings.force_usage,
            continuous_usage=continuous_usage,
            show_cached=settings.show_cached_tokens,
        )
        writer = ChatWriter(generation, state.tokenizer, options)
        return GenerationAnswer(generation, writer, stream=bool(body.stream))


def render_chat(state: ServerState, body: ChatRequest | TokenizeRequest) -> list[Part]:
    """The conversation in the template's form. Raises RequestError 400 for whatever the template cannot take."""
    if state.chat_template is None:
        raise RequestError(400, "This model has no chat template: use /v1/completions.")
    if not body.messages:
        raise invalid("messages", "must not be empty")
    messages = [template_message(i, message) for i, message in enumerate(body.messages)]
    num_chars = sum(len(message["content"]) for message in messages)
    check_text_length(num_chars, state.tokenizer, state.client.info.max_model_len)
    continues = bool(body.continue_final_message)
    generates = body.add_generation_prompt is not False if not continues else bool(body.add_generation_prompt)
    if continues and generates:
        raise invalid("continue_final_message", "cannot be combined with `add_generation_prompt`")
    extra = (body.chat_template_kwargs or {}) if isinstance(body, ChatRequest) else {}
    reserved = {"messages", "add_generation_prompt", "tools", "documents"}.intersection(extra)
    if reserved:
        raise invalid("chat_template_kwargs", f"must not set {', '.join(sorted(reserved))}")
    try:
        return state.chat_template.render(
            messages, add_generation_prompt=generates, continue_final_message=continues, extra=extra
        )
    except TemplateError as error:
        raise RequestError(400, str(error), param="messages") from error
    except RecursionError as error:
        raise invalid("chat_template_kwargs", "is nested too deeply") from error


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


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs", "is only allowed when `logprobs` is true")
        check_top_logprobs("top_logprobs", body.top_logprobs)
    if body.prompt_logprobs is not None:
        check_top_logprobs("prompt_logprobs", body.prompt_logprobs)
    return (body.top_logprobs or 0) if body.logprobs else None
