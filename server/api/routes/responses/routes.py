"""/v1/responses: create, retrieve, delete, cancel.

With several HTTP processes, each keeps the responses that it has made. A request about a response, or for the next one
of a conversation, is forwarded to the process that keeps it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from sys import getsizeof
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from server.api.answers.answer import GenerationAnswer, LongJson, Sent, json_response, unenforced_header
from server.api.answers.forwarded import forwarded
from server.api.request.chat import count_tokens, start_chat
from server.api.request.kept_objects import check_metadata
from server.api.request.schemas import ChatRequest, Message
from server.api.route import EVENTS, JSON, ApiRoute
from server.api.routes.endpoints import route, routes_of
from server.api.routes.responses.conversation import Conversation, new_items
from server.api.routes.responses.conversation_routes import Conversations, find_conversation
from server.api.routes.responses.event_log import EventLog, logged_events
from server.api.routes.responses.items import KeptItem, items_page, joined
from server.api.routes.responses.record import CANCELLED, COMPLETED, INCOMPLETE, ResponseRecord, ScoreWriter
from server.api.routes.responses.schemas import ConversationName, FunctionTool, ResponsesRequest
from server.api.routes.responses.store import Kept, ResponseStore
from server.api.routes.responses.translation import (
    chat_request,
    first_event,
    first_reference,
    format_fields,
    item_messages,
    items_work,
    own_names,
    read_function_tools,
    seen_tools,
)
from server.api.routes.responses.writer import ResponsesWriter
from server.api.state import Place, ServerState, current_place
from server.engine.generation import Generation
from server.http.auth import current_key
from server.http.encoding import json_pieces
from server.http.request_error import NOT_FOUND, RequestError, internal, invalid

logger = logging.getLogger("pallas_serve")

PATH = "/v1/responses"
COUNTED_BYTES = 64 * 1024  # of events; the store counts them after each growth by this number
BYTES_OF_A_BYTE = 5  # of JSON that is decoded


def responses_routes(state: ServerState) -> list[ApiRoute]:
    """The routes of the Responses API, and of its conversations."""
    responses = Responses(state)
    return [*routes_of(Conversations(state, responses.store), state), *routes_of(responses, state)]


class Responses:
    """Answers the routes of responses."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.store = ResponseStore(on_drop=self._stop_unkept)
        self._tasks: set[asyncio.Task[None]] = set()  # of responses in the background
        state.keeps = self.store.__contains__

    @route(f"POST {PATH}", ResponsesRequest, with_bytes=True, generates=True, media_types=(JSON, EVENTS))
    async def create(self, request: Request, body: ResponsesRequest, raw: bytes) -> Response:
        """Answers an input, and keeps the answer."""
        state = self._state
        if (elsewhere := await forwarded(state, request, _named(body), raw)) is not None:
            if body.background:
                current_place.get().leave_key()  # that process counts it
            return elsewhere
        check_metadata(body.metadata)
        stores, in_background = body.store is not False, bool(body.background)
        if in_background and not stores:
            raise invalid("store", "must be true when `background` is true")
        conversation = self._find_conversation(body)
        tools, messages, new, num_bytes = await self._messages(body, conversation)
        if conversation is not None:
            conversation.check_room(len(new), "conversation")
        seen = seen_tools(tools)
        chat = chat_request(body, seen, messages)
        with own_names():
            generation, plan = await start_chat(state, chat, request, id_prefix="resp")
        head = plan.generation.head
        num_bytes += _other_bytes(chat, body.instructions)
        scores = ScoreWriter(state.tokenizer, plan.generation.logprobs or 0)
        record = ResponseRecord(
            head.id,
            current_key.get(),
            _repeated(body, tools, head.model, state, conversation),
            messages,
            num_bytes,
            scores,
            {tool.function.name or "": tool for tool in seen},
            is_background=in_background,
        )
        writer = ResponsesWriter(generation, record, lambda: self._end(record, conversation, new))
        answer = GenerationAnswer(generation, writer, state.turns, stream=plan.generation.stream)
        if in_background and plan.generation.stream:
            record.log = EventLog()
            record.log.add(writer.queued())
        if stores:
            self.store.put(record)
        if not in_background:
            return Sent(partial(self._send, record, answer))
        place = current_place.get()
        place.hold()
        task = asyncio.create_task(_make_in_background(record, answer, writer, self.store, place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if record.log is not None:
            return logged_events(record.log, unenforced=generation.unenforced)
        return self._shown(record, unenforced_header(generation.unenforced))

    async def _messages(
        self, body: ResponsesRequest, conversation: Conversation | None
    ) -> tuple[list[FunctionTool], list[Message], list[KeptItem], int]:
        """The tools, all messages without the instructions, the new ones as items, and the size of all in memory."""
        if conversation is not None:
            earlier, num_bytes = conversation.messages(), conversation.num_bytes
        elif body.previous_response_id is not None:
            record = self._previous(body.previous_response_id)
            earlier, num_bytes = record.conversation(), record.num_bytes
        else:
            earlier, num_bytes = [], 0
        size = (len(bytes(body.tools)) if body.tools else 0) + items_work(body.input)
        tools, messages, new = await self._state.threads.in_thread(
            size,
            _translated,
            body,
            partial(self.store.find_items, owner=current_key.get()),
            strict=self._state.settings.strict_fields,
        )
        return tools, [*earlier, *messages], new, num_bytes + sum(item.num_bytes for item in new)

    @route(f"POST {PATH}/input_tokens", ResponsesRequest, with_bytes=True)
    async def input_tokens(self, request: Request, body: ResponsesRequest, raw: bytes) -> Response:
        """How many tokens an input has."""
        state = self._state
        if (elsewhere := await forwarded(state, request, _named(body), raw)) is not None:
            return elsewhere
        await state.find_model(body.model)
        tools, messages, *_ = await self._messages(body, self._find_conversation(body))
        chat = chat_request(body, seen_tools(tools), messages)
        with own_names():
            count = await count_tokens(state, chat)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    @route(f"POST {PATH}/compact")
    async def compact(self, request: Request) -> Response:
        """Is not supported: it answers 404."""
        message = "This server does not compact conversations: send the whole input, or less of it."
        raise RequestError(404, message, type=NOT_FOUND)

    @route(f"GET {PATH}/{{id}}", is_kept=True, media_types=(JSON, EVENTS))
    async def retrieve(self, request: Request) -> Response:
        """A response that was kept, or its events."""
        first = first_event(request.query_params)
        record = self._find(request)
        if first is None:
            return self._shown(record)
        if record.log is None:
            raise invalid("stream", "only a response made with `background` and `stream` keeps its events")
        return logged_events(record.log, first)

    @route(f"DELETE {PATH}/{{id}}", is_kept=True)
    async def delete(self, request: Request) -> Response:
        """Forgets it."""
        record = self._find(request)
        self.store.remove(record.id)
        self._stop_unkept(record)
        return json_response({"id": record.id, "object": "response", "deleted": True})

    @route(f"GET {PATH}/{{id}}/input_items", is_kept=True)
    async def input_items(self, request: Request) -> Response:
        """The input of a response."""
        record = self._find(request)
        items = await self._state.threads.in_thread(record.input_work, record.input_items)
        page = items_page(items, request.query_params)
        return LongJson(self._state.turns, json_pieces(page))

    @route(f"POST {PATH}/{{id}}/cancel", is_kept=True)
    async def cancel(self, request: Request) -> Response:
        """Ends one that is running.

        The connection of the response gets an error. One in the background stays as it is if it is over.
        """
        record = self._find(request)
        if record.is_over and record.status != CANCELLED and not record.is_background:
            raise RequestError(400, f"The response is over: {record.status}.", code="response_not_cancellable")
        self._stop(record)
        return self._shown(record)

    def _stop(self, record: ResponseRecord) -> None:
        generation = self._state.generations.get(record.id)
        if generation is not None and not record.is_over:
            generation.fail(RequestError(409, "The response was cancelled.", code="response_cancelled"))
        record.cancel()

    def _stop_unkept(self, kept: Kept) -> None:
        """Ends a response in the background that the store has dropped, because no client can ask for it."""
        if isinstance(kept, ResponseRecord) and kept.is_background:
            self._stop(kept)

    def _shown(self, record: ResponseRecord, headers: Sequence[tuple[bytes, bytes]] = ()) -> Response:
        generation = self._state.generations.get(record.id)
        if isinstance(generation, Generation) and generation.choices[0].num_tokens:
            record.begin()
        return LongJson(self._state.turns, json_pieces(record.body()), headers=headers)

    def _find(self, request: Request) -> ResponseRecord:
        id = request.path_params["id"]
        record = self.store.response(id, current_key.get())
        if record is None:
            message = f"Response with id {id[:100]!r} not found. It is not stored, or not any more."
            raise RequestError(404, message, type=NOT_FOUND, param="response_id")
        return record

    def _find_conversation(self, body: ResponsesRequest) -> Conversation | None:
        if body.conversation is None:
            return None
        if body.previous_response_id is not None:
            raise invalid("previous_response_id", "is not allowed when `conversation` is given")
        return find_conversation(self.store, _named(body) or "", "conversation")

    def _previous(self, id: str) -> ResponseRecord:
        record = self.store.response(id, current_key.get())
        if record is None:
            message = f"previous_response_id: there is no response with the id {id[:100]!r}."
            raise RequestError(400, message, param="previous_response_id", code="previous_response_not_found")
        if not record.is_over:
            raise invalid("previous_response_id", "the response is still being made")
        return record

    def _end(self, record: ResponseRecord, conversation: Conversation | None, new: list[KeptItem]) -> None:
        self.store.put_again(record)
        if conversation is not None and record.status in (COMPLETED, INCOMPLETE):
            self.store.add_items(conversation, [*new, *record.output_items()])

    async def _send(
        self, record: ResponseRecord, answer: GenerationAnswer, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Sends a response. If it is not complete when the connection ends, it is cancelled."""
        try:
            await answer(scope, receive, send)
        finally:
            record.cancel()


def _named(body: ResponsesRequest) -> str | None:
    """The id of the response or conversation that the request continues, or of the first item that it names."""
    continued = body.conversation.id if isinstance(body.conversation, ConversationName) else body.conversation
    return continued or body.previous_response_id or first_reference(body.input)


def _translated(
    body: ResponsesRequest, find: Callable[[Iterable[str]], Mapping[str, KeptItem]], *, strict: bool
) -> tuple[list[FunctionTool], list[Message], list[KeptItem]]:
    """The tools, and the input as messages and as items."""
    messages = item_messages(body.input, "input", find, strict=strict)
    return read_function_tools(body, strict=strict), joined(messages), new_items(messages)


def _other_bytes(chat: ChatRequest, instructions: str | None) -> int:
    """The size of a record in memory without its messages, approximately."""
    parsed = [field for field in (chat.tools, chat.response_format) if isinstance(field, msgspec.Raw)]
    return getsizeof(instructions) + BYTES_OF_A_BYTE * sum(map(len, parsed))


def _repeated(
    body: ResponsesRequest,
    tools: list[FunctionTool],
    model: str,
    state: ServerState,
    conversation: Conversation | None,
) -> dict[str, Any]:
    """The fields of the response that repeat the request, with defaults filled in."""
    defaults = state.settings.generation_defaults
    text_format = body.text.format if body.text else None
    return {
        "model": model,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "max_output_tokens": body.max_output_tokens,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "tools": tools,
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"} if text_format is None else format_fields(text_format)},
        "previous_response_id": body.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation.id},
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "background": bool(body.background),
    }


async def _make_in_background(
    record: ResponseRecord, answer: GenerationAnswer, writer: ResponsesWriter, store: ResponseStore, place: Place
) -> None:
    """Computes a response in the background. The record keeps the result, and its log, if it has one, the events.

    Args:
        store: keeps the record, and counts its growth.
        place: the request's place in the counts. It is held already, and is released at the end.
    """
    log = record.log
    num_counted = 0  # bytes of the log

    async def send(message: AsgiMessage) -> None:
        nonlocal num_counted
        if log is not None and message["type"] == "http.response.body":
            log.add(message["body"])
            if log.num_bytes >= num_counted + COUNTED_BYTES:
                num_counted = log.num_bytes
                store.put_again(record)

    def fail(error: RequestError) -> None:
        events = writer.failed(error)
        if log is not None:
            log.add(events)

    try:
        await answer({}, _never, send)
    except RequestError as error:
        error.__traceback__ = None  # its frames hold the generation
        fail(error)
    except Exception:
        logger.exception("response %s failed", record.id)
        fail(internal("The server has failed on this request."))
    finally:
        if log is not None:
            log.close()
        store.put_again(record)
        place.release()


async def _never() -> AsgiMessage:
    """A `receive` that never returns, because there is no client."""
    forever: asyncio.Future[AsgiMessage] = asyncio.get_running_loop().create_future()
    return await forever
