"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import GenerationAnswer
from server.api.request.body import BodyReader
from server.api.request.chat import count_tokens, start_chat
from server.api.request.schemas import ChatRequest
from server.api.route import EVENTS, JSON, ApiRoute
from server.api.routes.messages.schemas import COUNT_FIELDS, MESSAGES_FIELDS, CountRequest, MessagesRequest
from server.api.routes.messages.translation import chat_request
from server.api.routes.messages.writer import ANTHROPIC_ERRORS, MessagesWriter
from server.api.state import ServerState
from server.http.encoding import encode_json

PATH = "/v1/messages"


def messages_routes(state: ServerState) -> list[ApiRoute]:
    """The routes of Anthropic's API."""
    messages = Messages(state)
    return [
        ApiRoute(
            path=PATH,
            endpoint=messages.create,
            method="POST",
            generates=True,
            body=MessagesRequest,
            media_types=(JSON, EVENTS),
            errors=ANTHROPIC_ERRORS,
            summary="Answers a conversation, in Anthropic's form.",
        ),
        ApiRoute(
            path=f"{PATH}/count_tokens",
            endpoint=messages.count_tokens,
            method="POST",
            body=CountRequest,
            errors=ANTHROPIC_ERRORS,
            summary="How many tokens a conversation has.",
        ),
    ]


class Messages:
    """Answers the routes of `messages_routes`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        strict = state.settings.strict_fields
        self._reader = BodyReader(MessagesRequest, MESSAGES_FIELDS, strict=strict)
        self._count_reader = BodyReader(CountRequest, COUNT_FIELDS, strict=strict)

    async def create(self, request: Request) -> Response:
        """Answers a conversation, whole or streamed."""
        state = self._state
        body, raw = await self._reader.read_with_bytes(request, state.body_limits, state.threads)
        strict = state.settings.strict_fields
        chat = await self._translated(body, len(raw))
        generation, plan = await start_chat(state, chat, request, id_prefix="msg", lowers_max_tokens=not strict)
        writer = MessagesWriter(generation, plan.generation.head)
        return GenerationAnswer(generation, writer, state.turns, stream=bool(body.stream))

    async def count_tokens(self, request: Request) -> Response:
        """The number of a prompt's tokens. Nothing is generated."""
        state = self._state
        body, raw = await self._count_reader.read_with_bytes(request, state.body_limits, state.threads)
        await state.find_model(body.model)
        chat = await self._translated(body, len(raw))
        answer = {"input_tokens": await count_tokens(state, chat)}
        return Response(encode_json(answer), media_type="application/json")

    async def _translated(self, body: CountRequest, size: int) -> ChatRequest:
        return await self._state.threads.in_thread(size, chat_request, body, strict=self._state.settings.strict_fields)
