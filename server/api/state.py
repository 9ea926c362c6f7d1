"""The state that the routes share: one object per running server, passed to them when the app is built."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from server.api.metrics import ServerMetrics
from server.api.named_folder import Loaded, NamedFolder
from server.api.peers import EngineState, GetEngineState, Peers, state_of
from server.api.record import RequestRecord, log_request
from server.api.served_model import ServedModel, ServedModels
from server.api.tracing import Tracer
from server.batches.store import BatchStore
from server.database import Database
from server.engine.embedding import Embeddings
from server.engine.generation import Generation
from server.engine.protocol import Engine
from server.engine.wire import Adapter, AnyQuestion, LoadedModel, Reply
from server.grammar.checker import GrammarChecker
from server.http.body import BodyLimits
from server.http.request_error import BAD_REQUEST, NOT_FOUND, RequestError, model_not_found
from server.logs import JSON
from server.settings import Settings
from server.text.template_runner import TemplateRunner

MIN_MARKS = 2**16  # brackets and colons that a body may have even if the context is short


@dataclass(kw_only=True, slots=True)
class ServerState:
    """The state that the routes share."""

    settings: Settings
    engine: Engine
    engines: Sequence[Engine]  # the engine, or those of its group
    model: ServedModel  # the one of the start, by its first name
    models: ServedModels  # the others
    templates: TemplateRunner
    metrics: ServerMetrics
    database: Database
    tracer: Tracer | None = None  # None: there are no traces
    batches: BatchStore | None = None  # None: there are no files and batches
    run_batches: Callable[[], Coroutine[Any, Any, None]] | None = None  # until it is cancelled
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    draining: bool = False  # shutting down: new requests are refused
    drained: ctypes.c_bool = field(default_factory=ctypes.c_bool)  # by an administrator; shared by all processes
    num_in_flight: int = 0  # requests on the counted routes, of this process
    keys_in_flight: Counter[int] = field(default_factory=Counter)  # by the number of the key, in this process
    peers: Peers | None = None  # None: there is one HTTP process
    folders: Sequence[NamedFolder] = ()  # of models and adapters that are loaded when a request names them
    # by the ids of their answers; the response keeps its generation alive
    generations: WeakValueDictionary[str, Generation | Embeddings] = field(default_factory=WeakValueDictionary)

    @property
    def body_limits(self) -> BodyLimits:
        """The limits of a body. A conversation that fits the context has fewer marks, because the template writes some
        tokens for each message."""
        lengths = [self.engine.info.max_model_len, *(own.max_model_len for own in self.engine.models.values())]
        max_marks = max(MIN_MARKS, 2 * max(lengths))
        return BodyLimits(max_bytes=self.settings.max_body_bytes, max_marks=max_marks)

    @property
    def closed(self) -> str | None:
        """Why new requests are refused; None: they are not."""
        if self.draining:
            return "The server is shutting down."
        return "The server takes no new requests: an administrator drains it." if self.drained.value else None

    def count_in_flight(self, change: int) -> None:
        """Adds `change` to the requests that are being answered."""
        self.num_in_flight += change
        if self.peers is not None:
            self.peers.row.set_in_flight(self.num_in_flight)

    def count_of_key(self, number: int, change: int) -> int:
        """Adds `change` to the requests of an API key. Returns the key's requests in all processes."""
        if self.peers is not None:
            return self.peers.row.change_key(number, change)
        self.keys_in_flight[number] += change
        return self.keys_in_flight[number]

    @property
    def load(self) -> int:
        """The number of requests on the counted routes, in all processes."""
        return self.num_in_flight if self.peers is None else self.peers.row.in_flight

    def abort(self, ids: Sequence[str] | None, error: RequestError) -> list[str]:
        """Ends the requests of this process with these ids of answers, or all, with the error. Returns the ids of the
        requests that were running."""
        ended = []
        for id in list(self.generations) if ids is None else ids:
            generation = self.generations.get(id)
            if generation is not None and not generation.finished:
                generation.fail(error)
                ended.append(id)
        return ended

    def end_request(self, record: RequestRecord, method: str, path: str, status: int) -> None:
        """Counts the usage of a request that has ended, and logs it in the JSON log."""
        if record.work is not None and status == 200:
            usage = record.usage()
            tokens = usage["prompt_tokens"], usage["completion_tokens"]
            self.metrics.observe_usage(record.key, record.model, *tokens)
        if self.settings.log_format == JSON:
            log_request(record, method=method, path=path, status=status)
        record.work = None  # the context of a timer may hold the record

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    async def find_model(self, name: str | None) -> ServedModel:
        """The model that a request names; without `name`, the server's first. One in a folder of models or adapters is
        loaded if necessary. Raises RequestError 404, or 400 if it cannot be loaded."""
        if not name or name == self.model.name:
            return self.model
        if name in self.settings.model_names:
            return self.model.renamed(name)
        loaded: Loaded | None = self.engine.models.get(name) or self.engine.adapters.get(name)
        for folder in self.folders:
            loaded = loaded or await folder.load(name)
        match loaded:
            case None:
                raise model_not_found(name)
            case LoadedModel():
                return await self.models.find(loaded)
            case Adapter():
                below = self.model_below(loaded)
                model = self.model if below is None else await self.models.find(below)
                return model.renamed(name, adapter=loaded.identity)

    def model_below(self, adapter: Adapter) -> LoadedModel | None:
        """The model that a LoRA adapter changes; None: it is the engine's own."""
        found = (model for model in self.engine.models.values() if model.identity == adapter.model)
        return next(found) if adapter.model else None

    async def ask(self, question: AnyQuestion) -> Reply:
        """Asks the engines, through the parent's process if there are several HTTP processes."""
        if self.peers is None:
            return await self.engine.ask(question)
        return await self.peers.ask(question, Reply, timeout_s=None)

    async def change(self, question: AnyQuestion, problem: str = "") -> None:
        """Asks the engines for a change. Raises RequestError, which begins with `problem`, if they refuse it."""
        reply = await self.ask(question)
        if reply.error is not None:
            kind = NOT_FOUND if reply.status == 404 else BAD_REQUEST if reply.status < 500 else "InternalServerError"
            raise RequestError(reply.status, f"{problem}{reply.error}", type=kind)

    async def engine_state(self) -> EngineState:
        """The state of the engines. This process may receive a new name of the weights a moment later."""
        return state_of(self.engine) if self.peers is None else await self.peers.ask(GetEngineState(), EngineState)


class OpenRequest:
    """A request's place in the counts: of `/load`, of its API key, and of the requests for which a shutdown waits.

    The place is counted while it has a holder. Work that goes on after the answer holds it until its end.

    Args:
        key_number: the number of the request's key; None: requests are not counted by key.
        on_free: called when the last holder has released the place.
    """

    def __init__(self, state: ServerState, key_number: int | None, on_free: Callable[[], None] = lambda: None) -> None:
        self.key_number = key_number
        self._state = state
        self._on_free = on_free
        self._num_holders = 0

    def hold(self) -> int:
        """Adds a holder. Returns the number of requests of the key, including this one; 0: they are not counted."""
        self._num_holders += 1
        if self._num_holders == 1:
            self._state.count_in_flight(1)
        return self._count_key(self._num_holders == 1)

    def release(self) -> None:
        self._num_holders -= 1
        if self._num_holders == 0:
            self._state.count_in_flight(-1)
            self._count_key(-1)
            self._on_free()

    def leave_key(self) -> None:
        """Stops counting the request for its key, because it is refused."""
        self._count_key(-1)
        self.key_number = None

    def _count_key(self, change: int) -> int:
        return 0 if self.key_number is None else self._state.count_of_key(self.key_number, change)


current_place: ContextVar[OpenRequest] = ContextVar("current_place")  # of the request that the current task answers
