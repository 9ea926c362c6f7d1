"""/v1/responses: create, retrieve, delete, cancel.

The server's database has all responses. The process that makes one saves it there, and looks several times a second
whether it has been cancelled or deleted through another process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from server.api.answers.answer import AsgiResponse, GenerationAnswer, JsonAnswer
from server.api.request.chat import count_tokens, start_chat
from server.api.request.kept_objects import ListQuery
from server.api.request.schemas import Message
from server.api.route import EVENTS, JSON, ApiRoute
from server.api.routes.endpoints import route, routes_of
from server.api.routes.responses.conversation_routes import Conversations, check_room, find_conversation
from server.api.routes.responses.events import EventLog, kept_events
from server.api.routes.responses.items import (
    INCOMPLETE,
    RESPONSE_PREFIX,
    Item,
    array_of,
    input_items,
    item_id,
    items_of,
    items_page,
    joined,
    new_items,
    output_items,
    response_fields,
)
from server.api.routes.responses.record import CANCELLED, COMPLETED, QUEUED, ResponseRecord, logprobs
from server.api.routes.responses.schemas import ConversationName, FunctionTool, ResponsesRequest
from server.api.routes.responses.store import Kept, ResponseStore
from server.api.routes.responses.translation import (
    chat_request,
    first_event,
    format_fields,
    item_messages,
    kept_messages,
    own_names,
    read_function_tools,
    seen_tools,
)
from server.api.routes.responses.writer import ResponsesWriter
from server.api.served_model import ServedModel
from server.api.state import OpenRequest, ServerState, current_place
from server.engine.generation import Generation
from server.http.auth import current_key
from server.http.body import read_query
from server.http.request_error import NOT_FOUND, RequestError, internal, invalid, not_kept
from server.logs import ThrottledLog

logger = logging.getLogger("pallas_serve")
_log = ThrottledLog(logger)
PATH = "/v1/responses"
POLL_S = 0.25  # between two looks at the database for the responses that are being made
CANCEL_POLL_S = 0.02


def responses_routes(state: ServerState) -> list[ApiRoute]:
    """The routes of the Responses API, and of its conversations."""
    responses = Responses(state)
    return [*routes_of(Conversations(state, responses.store), state), *routes_of(responses, state)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Making:
    """A response that this process makes."""

    record: ResponseRecord
    log: EventLog | None  # of a stream in the background
    conversation: str | None  # the id of the conversation to which it is added
    new: Sequence[Item]  # of the input


class Responses:
    """Answers the routes of responses."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.store = ResponseStore(state.database)
        self._run = state.database.run
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._kept: dict[str, _Making] = {}  # those that are being made and kept, by id

    @route(f"POST {PATH}", ResponsesRequest, generates=True, media_types=(JSON, EVENTS))
    async def create(self, request: Request, body: ResponsesRequest) -> Response:
        """Answers an input, and keeps the answer."""
        state = self._state
        stores, in_background = body.store is not False, bool(body.background)
        if in_background and not stores:
            raise invalid("store", "must be true when `background` is true")
        conversation, earlier = await self._earlier(body)
        tools, messages, new = await self._translated(body, earlier)
        if conversation is not None:
            check_room(len(earlier) + len(new), "conversation")
        seen = seen_tools(tools)
        with own_names():
            generation, plan = await start_chat(state, chat_request(body, seen, messages), request, id_prefix="resp")
        head, model = plan.generation.head, plan.generation.model
        record = ResponseRecord(
            head.id,
            _repeated(body, tools, model, conversation),
            partial(logprobs, model.tokenizer, plan.generation.logprobs or 0),
            {tool.function.name or "": tool for tool in seen},
            is_background=in_background,
        )
        writer = ResponsesWriter(generation, record)
        answer = GenerationAnswer(generation, writer, stream=plan.generation.stream)
        log = EventLog() if in_background and plan.generation.stream else None
        making = _Making(record=record, log=log, conversation=conversation, new=new)
        if stores:
            try:
                await self._begin(making, messages, writer)
            except BaseException:
                generation.abort()
                raise
        if not in_background:
            return AsgiResponse(partial(self._send, making, answer))
        place = current_place.get()
        place.hold()
        self._start(self._make_in_background(making, answer, writer, place))
        if log is not None:
            return kept_events(self.store, record.id, log)
        return JsonAnswer(record.body())

    async def _earlier(self, body: ResponsesRequest) -> tuple[str | None, list[Item]]:
        """The id of the conversation that the request continues, if there is one, and the items before its input."""
        if body.conversation is not None:
            if body.previous_response_id is not None:
                raise invalid("previous_response_id", "is not allowed when `conversation` is given")
            named = body.conversation
            id = named.id if isinstance(named, ConversationName) else named
            await find_conversation(self.store, id, "conversation")
            return id, await self._run(self.store.items, id)
        if body.previous_response_id is None:
            return None, []
        kept = await self._kept_response(body.previous_response_id)
        if kept is None:
            message = f"previous_response_id: there is no response with the id {body.previous_response_id[:100]!r}."
            raise RequestError(400, message, param="previous_response_id", code="previous_response_not_found")
        if not kept.is_over:
            raise invalid("previous_response_id", "the response is still being made")
        return None, await self._run(kept.items)

    async def _translated(
        self, body: ResponsesRequest, earlier: Sequence[Item]
    ) -> tuple[list[FunctionTool], list[Message], list[Item]]:
        """The tools, all messages without the instructions, and the new ones as items."""
        find = partial(self.store.find_items, owner=current_key.get())
        strict = self._state.settings.strict_fields

        def translated() -> tuple[list[FunctionTool], list[Message], list[Item]]:
            messages = item_messages(body.input, "input", find, strict=strict)
            new = new_items(messages)
            return read_function_tools(body, strict=strict), joined([*kept_messages(earlier), *messages]), new

        return await self._run(translated)

    async def _begin(self, making: _Making, messages: Sequence[Message], writer: ResponsesWriter) -> None:
        """Saves a response that is about to be made."""
        record, log, owner = making.record, making.log, current_key.get()

        def save() -> None:
            items = array_of(input_items(messages, partial(item_id, "item", record.id)))
            self.store.add(record.id, owner, record.encoded(), items, is_over=False, has_events=log is not None)

        await self._run(save)
        if log is not None:
            await self._run(self.store.update, record.id, events=log.take(writer.queued()))
        self._kept[record.id] = making
        if self._watching is None or self._watching.done():
            self._watching = self._start(self._watch())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self) -> None:
        """Looks after the responses that are being made, until there are none."""
        while self._kept:
            try:
                cancelled = await self._run(self.store.touch, [*self._kept])
                for id, making in [*self._kept.items()]:
                    if cancelled.get(id, making.record.is_background):
                        self._stop(making.record)
                    elif making.record.status == QUEUED and self._has_begun(id):
                        making.record.begin()
                        await self._run(self.store.update, id, making.record.encoded())
            except OSError as error:
                _log.warning("responses cannot be saved now: %s", error)
            await asyncio.sleep(POLL_S)

    def _has_begun(self, id: str) -> bool:
        generation = self._state.generations.get(id)
        return isinstance(generation, Generation) and bool(generation.choices[0].num_tokens)

    @route(f"POST {PATH}/input_tokens", ResponsesRequest)
    async def input_tokens(self, request: Request, body: ResponsesRequest) -> Response:
        """How many tokens an input has."""
        _, earlier = await self._earlier(body)
        tools, messages, _ = await self._translated(body, earlier)
        chat = chat_request(body, seen_tools(tools), messages)
        with own_names():
            count = await count_tokens(self._state, chat)
        return JsonAnswer({"object": "response.input_tokens", "input_tokens": count})

    @route(f"POST {PATH}/compact")
    async def compact(self, request: Request) -> Response:
        """Is not supported: it answers 404."""
        message = "This server does not compact conversations: send the whole input, or less of it."
        raise RequestError(404, message, type=NOT_FOUND)

    @route(f"GET {PATH}/{{id}}", media_types=(JSON, EVENTS))
    async def retrieve(self, request: Request) -> Response:
        """A response that was kept, or its events."""
        first = first_event(request.query_params)
        kept = await self._find(request)
        if first is None:
            return JsonAnswer(msgspec.Raw(kept.fields))
        if not kept.has_events:
            raise invalid("stream", "only a response made with `background` and `stream` keeps its events")
        making = self._kept.get(kept.id)
        return kept_events(self.store, kept.id, None if making is None else making.log, first)

    @route(f"DELETE {PATH}/{{id}}")
    async def delete(self, request: Request) -> Response:
        """Forgets it."""
        id = (await self._find(request)).id
        await self._run(self.store.remove, id)
        making = self._kept.get(id)
        if making is not None and making.record.is_background:
            self._stop(making.record)
        return JsonAnswer({"id": id, "object": "response", "deleted": True})

    @route(f"GET {PATH}/{{id}}/input_items")
    async def input_items(self, request: Request) -> Response:
        """The input of a response."""
        kept = await self._find(request)
        items = await self._run(items_of, kept.input)
        return JsonAnswer(items_page(items, read_query(request.query_params, ListQuery)))

    @route(f"POST {PATH}/{{id}}/cancel")
    async def cancel(self, request: Request) -> Response:
        """Ends one that is running.

        The connection of the response gets an error. One in the background stays as it is if it is over.
        """
        kept = await self._find(request)
        if kept.is_over:
            shown = response_fields(kept.fields)
            if shown.status != CANCELLED and not shown.background:
                raise RequestError(400, f"The response is over: {shown.status}.", code="response_not_cancellable")
            return JsonAnswer(msgspec.Raw(kept.fields))
        await self._run(self.store.cancel, kept.id)
        if (making := self._kept.get(kept.id)) is not None:
            self._stop(making.record)
        while not kept.is_over:  # the process that makes it saves it
            await asyncio.sleep(CANCEL_POLL_S)
            kept = await self._find(request)
        return JsonAnswer(msgspec.Raw(kept.fields))

    def _stop(self, record: ResponseRecord) -> None:
        generation = self._state.generations.get(record.id)
        if generation is not None and not record.is_over:
            generation.fail(RequestError(409, "The response was cancelled.", code="response_cancelled"))
        record.cancel()

    async def _kept_response(self, id: str) -> Kept | None:
        return await self._run(self.store.find, id, current_key.get()) if id.startswith(RESPONSE_PREFIX) else None

    async def _find(self, request: Request) -> Kept:
        id = request.path_params["id"]
        kept = await self._kept_response(id)
        if kept is None:
            raise not_kept("Response", id, "response_id")
        return kept

    async def _end(self, making: _Making, events: Sequence[tuple[int, bytes]] = ()) -> None:
        """Saves a response that is over, and adds it to its conversation. Further calls have no effect."""
        record = making.record
        is_kept = self._kept.pop(record.id, None) is not None
        conversation = making.conversation if record.status in (COMPLETED, INCOMPLETE) else None
        if not is_kept and conversation is None:
            return

        def save() -> None:
            fields = record.encoded()  # a long one takes its time
            with self.store.database.transaction():
                if conversation is not None:
                    self.store.add_items(conversation, [*making.new, *output_items(fields)])
                if is_kept:
                    self.store.update(record.id, fields, is_over=True, events=events)

        try:
            await self._run(save)
        except OSError as error:
            _log.warning("response %s is not kept: %s", record.id, error)

    async def _send(
        self, making: _Making, answer: GenerationAnswer, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Sends a response, and saves it before its end is sent. If it is not complete when the connection ends, it is
        cancelled."""
        record = making.record
        has_ended = False

        async def send_saved(message: AsgiMessage) -> None:
            nonlocal has_ended
            if record.is_over and not has_ended:
                has_ended = True
                await self._end(making)
            await send(message)

        try:
            await answer(scope, receive, send_saved)
        finally:
            record.cancel()
            if not has_ended:
                await self._end(making)

    async def _make_in_background(
        self, making: _Making, answer: GenerationAnswer, writer: ResponsesWriter, place: OpenRequest
    ) -> None:
        """Makes a response without a connection. Its last events are saved with its end.

        Args:
            place: the request's place in the counts. It is held already, and is released at the end.
        """
        record, log = making.record, making.log
        last: list[tuple[int, bytes]] = []
        has_begun = False

        async def send(message: AsgiMessage) -> None:
            nonlocal has_begun
            if log is None or message["type"] != "http.response.body":
                return
            events = log.take(message["body"])
            if record.is_over:
                last.extend(events)
            elif events:
                fields = None if has_begun else record.encoded()  # later ones have the same status
                has_begun = True
                await self._run(self.store.update, record.id, fields, events=events)
                log.wake()

        def fail(error: RequestError) -> None:
            events = writer.failed(error)
            if log is not None:
                last.extend(log.take(events))

        try:
            await answer({}, _never, send)
        except RequestError as error:
            error.__traceback__ = None  # its frames hold the generation
            fail(error)
        except Exception:
            logger.exception("response %s failed", record.id)
            fail(internal("The server has failed on this request."))
        finally:
            await self._end(making, last)
            if log is not None:
                log.wake()
            place.release()


def _repeated(
    body: ResponsesRequest, tools: list[FunctionTool], model: ServedModel, conversation: str | None
) -> dict[str, Any]:
    """The fields of the response that repeat the request, with defaults filled in."""
    defaults = model.generation_defaults
    text_format = body.text.format if body.text else None
    return {
        "model": model.name,
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
        "conversation": None if conversation is None else {"id": conversation},
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "background": bool(body.background),
    }


async def _never() -> AsgiMessage:
    """A `receive` that never returns, because there is no client."""
    forever: asyncio.Future[AsgiMessage] = asyncio.get_running_loop().create_future()
    return await forever
