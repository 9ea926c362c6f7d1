"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import GenerationAnswer
from server.api.answers.chat_writer import ChatWriter
from server.api.request.body import BodyReader
from server.api.request.chat import start_chat
from server.api.request.fields import CHAT_FIELDS
from server.api.request.schemas import ChatRequest
from server.api.route import EVENTS, JSON, ApiRoute
from server.api.state import ServerState


def chat_routes(state: ServerState) -> list[ApiRoute]:
    """The route of chat completions."""
    return [
        ApiRoute(
            path="/v1/chat/completions",
            endpoint=Chat(state).__call__,
            method="POST",
            generates=True,
            body=ChatRequest,
            media_types=(JSON, EVENTS),
            summary="Answers a conversation.",
        )
    ]


class Chat:
    """Answers `/v1/chat/completions`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._reader = BodyReader(ChatRequest, CHAT_FIELDS, strict=state.settings.strict_fields)

    async def __call__(self, request: Request) -> Response:
        state = self._state
        body = await self._reader.read(request, state.body_limits, state.threads)
        generation, plan = await start_chat(state, body, request, id_prefix="chatcmpl")
        writer = ChatWriter(generation, plan.generation.head, state.tokenizer, plan.options)
        return GenerationAnswer(generation, writer, state.turns, stream=bool(body.stream))
