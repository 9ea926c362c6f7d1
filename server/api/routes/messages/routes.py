"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import GenerationAnswer, JsonAnswer
from server.api.request.chat import count_tokens, start_chat
from server.api.request.schemas import ChatRequest
from server.api.route import EVENTS, JSON
from server.api.routes.endpoints import Routes, route
from server.api.routes.messages.schemas import CountRequest, MessagesRequest
from server.api.routes.messages.translation import chat_request
from server.api.routes.messages.writer import ANTHROPIC_ERRORS, MessagesWriter

PATH = "/v1/messages"


class Messages(Routes):
    """Answers the routes of Anthropic's API."""

    route_options: ClassVar = {"errors": ANTHROPIC_ERRORS}

    @route(f"POST {PATH}", MessagesRequest, translate=chat_request, generates=True, media_types=(JSON, EVENTS))
    async def create(self, request: Request, chat: ChatRequest) -> Response:
        """Answers a conversation, in Anthropic's form."""
        state, strict = self._state, self._state.settings.strict_fields
        generation, plan = await start_chat(state, chat, request, id_prefix="msg", lowers_max_tokens=not strict)
        writer = MessagesWriter(generation, plan.generation.head)
        return GenerationAnswer(generation, writer, stream=bool(chat.stream))

    @route(f"POST {PATH}/count_tokens", CountRequest, translate=chat_request)
    async def count_tokens(self, request: Request, chat: ChatRequest) -> Response:
        """How many tokens a conversation has."""
        return JsonAnswer({"input_tokens": await count_tokens(self._state, chat)})
