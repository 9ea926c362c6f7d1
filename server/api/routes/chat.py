"""POST /v1/chat/completions, and vLLM's /v1/chat/completions/batch for several conversations."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import GenerationAnswer
from server.api.answers.chat_writer import BatchChatWriter, ChatWriter
from server.api.request.beam_search import answer_of
from server.api.request.chat import check_chat, complete, start_chats
from server.api.request.sampling import check_num_choices
from server.api.request.schemas import BatchChatRequest, ChatRequest
from server.api.route import EVENTS, JSON
from server.api.routes.endpoints import Routes, route
from server.engine.generation import Generation
from server.http.request_error import invalid, unsupported


class Chat(Routes):
    """Answers the routes of chat completions."""

    @route("POST /v1/chat/completions", ChatRequest, generates=True, media_types=(JSON, EVENTS))
    async def create(self, request: Request, body: ChatRequest) -> Response:
        """Answers a conversation."""
        state = self._state
        plan = await check_chat(state, body, request, id_prefix="chatcmpl")
        await complete(state, plan)

        def new_writer(generation: Generation) -> ChatWriter:
            return ChatWriter(generation, plan.generation.head, plan.generation.model.tokenizer, plan.options)

        return await answer_of(state, body, plan.generation, new_writer)

    @route("POST /v1/chat/completions/batch", BatchChatRequest, generates=True)
    async def batch(self, request: Request, body: BatchChatRequest) -> Response:
        """Answers several conversations, with a choice for each."""
        state = self._state
        if not body.messages:
            raise invalid("messages", "must not be empty")
        if body.n not in (None, 1):
            raise invalid("n", "must be 1 for several conversations")
        for param in ("stream", "prompt_logprobs", "tools", "use_beam_search"):
            if getattr(body, param) not in (None, False, msgspec.UNSET, msgspec.Raw(b"null"), msgspec.Raw(b"[]")):
                raise unsupported(param, "for several conversations it is")
        check_num_choices(len(body.messages), body.n, most=state.settings.max_choices, prompts="messages")
        generation, plans = await start_chats(state, body.each(), request, id_prefix="chatcmpl")
        options, first = [plan.options for plan in plans], plans[0].generation
        writer = BatchChatWriter(generation, first.head, first.model.tokenizer, options)
        return GenerationAnswer(generation, writer, stream=False)
