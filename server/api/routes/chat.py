"""POST /v1/chat/completions, and vLLM's /v1/chat/completions/batch for several conversations."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import GenerationAnswer
from server.api.answers.chat_writer import BatchChatWriter, ChatWriter
from server.api.request.body import BodyReader
from server.api.request.chat import start_chat, start_chats
from server.api.request.fields import BATCH_CHAT_FIELDS, CHAT_FIELDS
from server.api.request.sampling import check_num_choices
from server.api.request.schemas import BatchChatRequest, ChatRequest
from server.api.route import EVENTS, JSON, ApiRoute
from server.api.state import ServerState
from server.http.request_error import invalid, unsupported


def chat_routes(state: ServerState) -> list[ApiRoute]:
    """The routes of chat completions."""
    chat = Chat(state)
    return [
        ApiRoute(
            path="/v1/chat/completions",
            endpoint=chat.__call__,
            method="POST",
            generates=True,
            body=ChatRequest,
            media_types=(JSON, EVENTS),
            summary="Answers a conversation.",
        ),
        ApiRoute(
            path="/v1/chat/completions/batch",
            endpoint=chat.batch,
            method="POST",
            generates=True,
            body=BatchChatRequest,
            summary="Answers several conversations, with a choice for each.",
        ),
    ]


class Chat:
    """Answers the routes of `chat_routes`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        strict = state.settings.strict_fields
        self._reader = BodyReader(ChatRequest, CHAT_FIELDS, strict=strict)
        self._batch_reader = BodyReader(BatchChatRequest, BATCH_CHAT_FIELDS, strict=strict)

    async def __call__(self, request: Request) -> Response:
        state = self._state
        body = await self._reader.read(request, state.body_limits, state.threads)
        generation, plan = await start_chat(state, body, request, id_prefix="chatcmpl")
        writer = ChatWriter(generation, plan.generation.head, state.tokenizer, plan.options)
        return GenerationAnswer(generation, writer, state.turns, stream=bool(body.stream))

    async def batch(self, request: Request) -> Response:
        """One answer, whose choices are those of the conversations in their order."""
        state = self._state
        body = await self._batch_reader.read(request, state.body_limits, state.threads)
        if not body.messages:
            raise invalid("messages", "must not be empty")
        if body.n not in (None, 1):
            raise invalid("n", "must be 1 for several conversations")
        for param in ("stream", "prompt_logprobs", "tools"):
            if getattr(body, param) not in (None, False, msgspec.UNSET, msgspec.Raw(b"null"), msgspec.Raw(b"[]")):
                raise unsupported(param, "for several conversations it is")
        check_num_choices(len(body.messages), body.n, most=state.settings.max_choices, prompts="messages")
        generation, plans = await start_chats(state, body.each(), request, id_prefix="chatcmpl")
        options = [plan.options for plan in plans]
        writer = BatchChatWriter(generation, plans[0].generation.head, state.tokenizer, options)
        return GenerationAnswer(generation, writer, state.turns, stream=False)
