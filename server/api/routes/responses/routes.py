"""/v1/responses: create, retrieve, delete, cancel.

With several HTTP processes, each keeps the responses that it has made. A request about a response, or for the next one
of a conversation, goes on to the process that keeps it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from sys import getsizeof
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from server.api.answers.answer import GenerationAnswer, LongJson, json_response, unenforced_header
from server.api.answers.forwarded import ForwardedAnswer
from server.api.peers import FORWARDED
from server.api.request.body import BodyReader
from server.api.request.chat import count_tokens, start_chat
from server.api.request.schemas import ChatRequest, Message
from server.api.route import EVENTS, JSON, ApiRoute
from server.api.routes.responses.event_log import EventLog, LoggedEvents
from server.api.routes.responses.input_items import items_page
from server.api.routes.responses.record import CANCELLED, ResponseRecord
from server.api.routes.responses.schemas import RESPONSES_FIELDS, FunctionTool, ResponsesRequest
from server.api.routes.responses.scores import ScoreWriter
from server.api.routes.responses.store import ResponseStore
from server.api.routes.responses.translation import (
    chat_request,
    custom_names,
    first_event,
    format_fields,
    input_messages,
    own_names,
    read_function_tools,
)
from server.api.routes.responses.writer import ResponsesWriter
from server.api.state import Place, ServerState, current_place
from server.engine.generation import Generation
from server.http.auth import current_key
from server.http.encoding import json_pieces
from server.http.request_error import NOT_FOUND, RequestError, internal, invalid

logger = logging.getLogger("pallas_serve")

PATH = "/v1/responses"
MAX_METADATA = 16
MAX_METADATA_CHARS = (64, 512)  # of a key, of a value
CHARS_OF_AN_ITEM = 40  # the work to translate it is that of such a text
BYTES_OF_A_MESSAGE = 300  # in memory, besides its texts
COUNTED_BYTES = 64 * 1024  # of events; the store counts them after each growth by this number
BYTES_OF_A_BYTE = 5  # of JSON that is decoded


def responses_routes(state: ServerState) -> list[ApiRoute]:
    """The routes of the Responses API."""
    responses = Responses(state)
    return [
        ApiRoute(
            path=PATH,
            endpoint=responses.create,
            method="POST",
            generates=True,
            body=ResponsesRequest,
            media_types=(JSON, EVENTS),
            summary="Answers an input, and keeps the answer.",
        ),
        ApiRoute(
            path=f"{PATH}/input_tokens",
            endpoint=responses.input_tokens,
            method="POST",
            body=ResponsesRequest,
            summary="How many tokens an input has.",
        ),
        ApiRoute(
            path=f"{PATH}/{{id}}",
            endpoint=responses.retrieve,
            media_types=(JSON, EVENTS),
            summary="A response that was kept, or its events.",
        ),
        ApiRoute(path=f"{PATH}/{{id}}", endpoint=responses.delete, method="DELETE", summary="Forgets it."),
        ApiRoute(path=f"{PATH}/{{id}}/input_items", endpoint=responses.input_items, summary="The input of a response."),
        ApiRoute(
            path=f"{PATH}/{{id}}/cancel", endpoint=responses.cancel, method="POST", summary="Ends one that is running."
        ),
    ]


class Responses:
    """Answers the routes of `responses_routes`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._reader = BodyReader(ResponsesRequest, RESPONSES_FIELDS, strict=state.settings.strict_fields)
        self._store = ResponseStore()
        self._running: dict[str, Generation] = {}  # of responses that are stored
        self._tasks: set[asyncio.Task[None]] = set()  # of responses in the background
        state.keeps_response = self._store.__contains__

    async def create(self, request: Request) -> Response:
        """Answers an input, whole, streamed or in the background."""
        state = self._state
        body, raw = await self._reader.read_with_bytes(request, state.body_limits, state.threads)
        if (keeper := await self._keeper(request, body.previous_response_id)) is not None:
            forwarded = ForwardedAnswer(request, keeper, raw)
            if body.background:
                current_place.get().leave_key()  # that process counts it
            return forwarded
        _check_metadata(body.metadata)
        stores, in_background = body.store is not False, bool(body.background)
        if in_background and not stores:
            raise invalid("store", "must be true when `background` is true")
        earlier = self._earlier(body.previous_response_id)
        tools, messages, num_bytes = await self._conversation(body, earlier)
        chat = chat_request(body, tools, messages)
        with own_names():
            generation, plan = await start_chat(state, chat, request, id_prefix="resp")
        head = plan.generation.head
        num_bytes += _other_bytes(chat, body.instructions) + (0 if earlier is None else earlier.num_bytes)
        scores = ScoreWriter(state.tokenizer, plan.generation.logprobs or 0)
        record = ResponseRecord(
            head.id,
            current_key.get(),
            _repeated(body, tools, head.model, state),
            messages,
            num_bytes,
            scores,
            custom_names(tools),
            is_background=in_background,
        )
        writer = ResponsesWriter(generation, record, lambda: self._end(record))
        answer = GenerationAnswer(generation, writer, state.turns, stream=plan.generation.stream)
        if in_background and plan.generation.stream:
            record.log = EventLog()
            record.log.add(writer.queued())
        if stores:
            self._running[record.id] = generation
            self._keep(record)
        if not in_background:
            return _Answer(answer, lambda: self._leave(record))
        place = current_place.get()
        place.hold()
        task = asyncio.create_task(self._make(record, answer, writer, place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if record.log is not None:
            return LoggedEvents(record.log, unenforced=generation.unenforced)
        return self._shown(record, unenforced_header(generation.unenforced))

    async def _make(
        self, record: ResponseRecord, answer: GenerationAnswer, writer: ResponsesWriter, place: Place
    ) -> None:
        """Makes a response in the background: its answer goes to nobody, or to its log."""
        log = record.log
        num_counted = 0  # bytes of the log

        async def send(message: AsgiMessage) -> None:
            nonlocal num_counted
            if log is not None and message["type"] == "http.response.body":
                log.add(message["body"])
                if log.num_bytes >= num_counted + COUNTED_BYTES:
                    num_counted = log.num_bytes
                    self._keep_again(record)

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
            self._keep_again(record)
            place.release()

    async def _conversation(
        self, body: ResponsesRequest, earlier: ResponseRecord | None
    ) -> tuple[list[FunctionTool], list[Message], int]:
        """The tools, all messages without the instructions, and the size in memory of those that are new."""
        size = len(bytes(body.tools)) if body.tools else 0
        tools, new, num_bytes = await self._state.threads.in_thread(
            size + _size(body), _translated, body, strict=self._state.settings.strict_fields
        )
        return tools, new if earlier is None else [*earlier.conversation(), *new], num_bytes

    async def input_tokens(self, request: Request) -> Response:
        """Counts the tokens of the prompt that the same body would give `create`."""
        state = self._state
        body, raw = await self._reader.read_with_bytes(request, state.body_limits, state.threads)
        if (keeper := await self._keeper(request, body.previous_response_id)) is not None:
            return ForwardedAnswer(request, keeper, raw)
        state.check_model(body.model)
        tools, messages, _ = await self._conversation(body, self._earlier(body.previous_response_id))
        chat = chat_request(body, tools, messages)
        with own_names():
            count = await count_tokens(state, chat)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def _keeper(self, request: Request, id: str | None) -> Path | None:
        """The other process that keeps the response. None: this one does, or none."""
        peers = self._state.peers
        if id is None or peers is None or FORWARDED in request.scope or id in self._store:
            return None
        return await peers.keeper_of(id)

    async def retrieve(self, request: Request) -> Response:
        """A stored response, or its events."""
        first = first_event(request.query_params)
        if (keeper := await self._keeper(request, request.path_params["id"])) is not None:
            return ForwardedAnswer(request, keeper)
        record = self._find(request)
        if first is None:
            return self._shown(record)
        if record.log is None:
            raise invalid("stream", "only a response made with `background` and `stream` keeps its events")
        return LoggedEvents(record.log, first)

    async def input_items(self, request: Request) -> Response:
        """The input of a stored response, in pages."""
        if (keeper := await self._keeper(request, request.path_params["id"])) is not None:
            return ForwardedAnswer(request, keeper)
        record = self._find(request)
        page = items_page(record.id, record.input_messages, request.query_params)
        return LongJson(self._state.turns, json_pieces(page))

    async def delete(self, request: Request) -> Response:
        """Forgets a stored response."""
        if (keeper := await self._keeper(request, request.path_params["id"])) is not None:
            return ForwardedAnswer(request, keeper)
        record = self._find(request)
        self._store.remove(record.id)
        self._stop_unkept(record)
        answer = {"id": record.id, "object": "response", "deleted": True}
        return LongJson(self._state.turns, json_pieces(answer))

    async def cancel(self, request: Request) -> Response:
        """Ends a response that is being generated. The connection of the response gets an error. One in the background
        stays as it is if it is over."""
        if (keeper := await self._keeper(request, request.path_params["id"])) is not None:
            return ForwardedAnswer(request, keeper)
        record = self._find(request)
        if record.is_over and record.status != CANCELLED and not record.is_background:
            raise RequestError(400, f"The response is over: {record.status}.", code="response_not_cancellable")
        self._stop(record)
        return self._shown(record)

    def _stop(self, record: ResponseRecord) -> None:
        record.cancel()
        if (generation := self._running.pop(record.id, None)) is not None:
            generation.fail(RequestError(409, "The response was cancelled.", code="response_cancelled"))

    def _stop_unkept(self, record: ResponseRecord) -> None:
        """Nobody can ask for a response in the background that is not kept any more."""
        if record.is_background:
            self._stop(record)

    def _shown(self, record: ResponseRecord, headers: Sequence[tuple[bytes, bytes]] = ()) -> Response:
        generation = self._running.get(record.id)
        if generation is not None and generation.choices[0].num_tokens:
            record.begin()
        return LongJson(self._state.turns, json_pieces(record.body()), headers=headers)

    def _find(self, request: Request) -> ResponseRecord:
        id = request.path_params["id"]
        record = self._store.get(id, current_key.get())
        if record is None:
            message = f"Response with id {id[:100]!r} not found. It is not stored, or not any more."
            raise RequestError(404, message, type=NOT_FOUND, param="response_id")
        return record

    def _earlier(self, id: str | None) -> ResponseRecord | None:
        """The response that the request continues."""
        if id is None:
            return None
        record = self._store.get(id, current_key.get())
        if record is None:
            message = f"previous_response_id: there is no response with the id {id[:100]!r}."
            raise RequestError(400, message, param="previous_response_id", code="previous_response_not_found")
        if not record.is_over:
            raise invalid("previous_response_id", "the response is still being made")
        return record

    def _end(self, record: ResponseRecord) -> None:
        self._running.pop(record.id, None)
        self._keep_again(record)

    def _keep_again(self, record: ResponseRecord) -> None:
        """The record has grown. It may have been deleted meanwhile."""
        if self._store.get(record.id, record.owner) is record:
            self._keep(record)

    def _keep(self, record: ResponseRecord) -> None:
        for dropped in self._store.put(record):
            self._stop_unkept(dropped)

    def _leave(self, record: ResponseRecord) -> None:
        """The connection has ended: a response that is not complete by now is cancelled."""
        self._running.pop(record.id, None)
        record.cancel()


async def _never() -> AsgiMessage:
    """The messages from a client that is not there."""
    forever: asyncio.Future[AsgiMessage] = asyncio.get_running_loop().create_future()
    return await forever


class _Answer(Response):
    """An answer. `on_done` is called when it has been sent or its client has disconnected."""

    def __init__(self, answer: Response, on_done: Callable[[], None]) -> None:
        self._answer = answer
        self._on_done = on_done
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            self._on_done()


def _translated(body: ResponsesRequest, *, strict: bool) -> tuple[list[FunctionTool], list[Message], int]:
    """The tools, the messages of the input, and the size of the messages in memory, approximately."""
    messages = input_messages(body, strict=strict)
    return read_function_tools(body, strict=strict), messages, sum(map(_message_size, messages))


def _size(body: ResponsesRequest) -> int:
    """The size, in characters, of the work to translate the body. Texts do not count: they are not copied."""
    return 0 if isinstance(body.input, str) else CHARS_OF_AN_ITEM * len(body.input)


def _message_size(message: Message) -> int:
    parts = [message.content] if isinstance(message.content, str) else [part.text for part in message.content or ()]
    calls = [call.function.arguments for call in message.tool_calls or ()]
    return BYTES_OF_A_MESSAGE + sum(getsizeof(text) for text in (*parts, *calls) if isinstance(text, str))


def _other_bytes(chat: ChatRequest, instructions: str | None) -> int:
    """The size in memory of what a record keeps besides the messages, approximately."""
    parsed = [field for field in (chat.tools, chat.response_format) if isinstance(field, msgspec.Raw)]
    return getsizeof(instructions) + BYTES_OF_A_BYTE * sum(map(len, parsed))


def _check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    key_chars, value_chars = MAX_METADATA_CHARS
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"at most {MAX_METADATA} pairs are kept, got {len(metadata)}")
    if any(len(key) > key_chars or len(value) > value_chars for key, value in metadata.items()):
        raise invalid("metadata", f"keys have at most {key_chars} characters, values at most {value_chars}")


def _repeated(body: ResponsesRequest, tools: list[FunctionTool], model: str, state: ServerState) -> dict[str, Any]:
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
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "background": bool(body.background),
    }
