"""The engines of one process as one engine. Each has the models of one shape and form, and its own programs, pages and
queue.

All steps go to the same device, in the order in which they are dispatched. An engine has at most `pipeline_depth` steps
in flight, so a step waits for at most `pipeline_depth` steps of each other engine. A CPU runs steps of several engines
at the same time, and they share its cores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from batcher.buckets import BucketLadder
from batcher.change import Change, OnDone, PauseMode
from batcher.delivery import Tokens
from batcher.engine import Engine
from batcher.grammar import Grammars
from batcher.request import FinishReason, Request
from batcher.scheduling.request_state import OnOutput
from batcher.stats import EngineStats, total_of
from batcher.step import WeightsKind


class Engines:
    """Passes each request to the engine of its model. It is thread-safe, and has the methods of `Engine` that a server
    uses.

    Args:
        first: the engine of the models whose engine is not named by `place`. It alone has LoRA adapters, and its
            weights can be changed.
    """

    def __init__(self, first: Engine) -> None:
        self.first = first
        self._all: tuple[Engine, ...] = (first,)
        self._own = {first: 0}  # engine -> the identity of its model 0
        self._engine_of: dict[int, Engine] = {}  # by identity of a model
        self._on_tokens: Callable[[Tokens], None] | None = None
        self._num_added = 0
        self._lock = threading.Lock()  # of the engines and their state
        self._is_started = self._is_paused = self._is_closed = False

    def add(self, engine: Engine, own: int) -> None:
        """Adds an engine, not started. `own` is the identity of its model 0."""
        with self._lock:
            self._num_added += 1
            engine.number_from(self._num_added << 40)
            if self._on_tokens is not None:
                engine.listen(self._on_tokens)
            if self._is_paused:
                engine.pause(PauseMode.KEEP, False, lambda error: None)
            if self._is_started:
                engine.start()
            self._own[engine] = own
            self._all = (*self._all, engine)
            if self._is_closed:
                engine.shutdown()

    def remove(self, engine: Engine) -> None:
        """Ends an engine that has no requests and no models."""
        with self._lock:
            self._all = tuple(other for other in self._all if other is not engine)
            del self._own[engine]
        engine.shutdown()

    def place(self, model: int, engine: Engine) -> None:
        """Passes the requests of the model to this engine."""
        self._engine_of[model] = engine

    def _home(self, model: int) -> tuple[Engine, int]:
        """The engine of a model, and the model's identity there."""
        engine = self._engine_of.get(model, self.first)
        return engine, 0 if model == self._own[engine] else model

    # --- as `Engine` ---

    @property
    def ladder(self) -> BucketLadder:
        return self.first.ladder

    @property
    def num_live(self) -> int:
        return sum(engine.num_live for engine in self._all)

    @property
    def death(self) -> BaseException | None:
        return next((engine.death for engine in self._all if engine.death is not None), None)

    def listen(self, on_tokens: Callable[[Tokens], None]) -> None:
        with self._lock:
            self._on_tokens = on_tokens
            for engine in self._all:
                engine.listen(on_tokens)

    def start(self) -> None:
        with self._lock:
            self._is_started = True
            for engine in self._all:
                engine.start()

    def shutdown(self, drain_s: float = 0.0) -> None:
        with self._lock:
            self._is_closed = True
        for engine in self._all:
            engine.shutdown(drain_s)

    def add_request(self, request: Request, on_output: OnOutput) -> None:
        engine, model = self._home(request.model)
        engine.add_request(request if model == request.model else replace(request, model=model), on_output)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        for engine in self._all:
            engine.abort(request_id, reason)

    def reset_prefix_cache(self, *, reset_external: bool = False) -> None:
        for engine in self._all:
            engine.reset_prefix_cache(reset_external=reset_external)

    def change(self, change: Change) -> None:
        """Changes the first engine. Raises ValueError for a change that frees the device, if there are others."""
        if change.frees_device and len(self._all) > 1:
            raise ValueError("models of another shape are on the device, too: unload them first (/v1/models/unload)")
        self.first.change(change)

    def pause(self, mode: PauseMode, clear_cache: bool, on_done: OnDone) -> None:
        with self._lock:
            self._is_paused = True
            self._ask_all(lambda engine, done: engine.pause(mode, clear_cache, done), on_done)

    def resume(self, on_done: OnDone) -> None:
        with self._lock:
            self._is_paused = False
            self._ask_all(Engine.resume, on_done)

    def _ask_all(self, ask: Callable[[Engine, OnDone], None], on_done: OnDone) -> None:
        """Calls `on_done` when all engines are done, with an error if there was one."""
        errors: list[Exception | None] = []
        asked, num_done = self._all, count(1)

        def done(error: Exception | None) -> None:
            errors.append(error)
            if next(num_done) == len(asked):
                on_done(next(filter(None, errors), None))

        for engine in asked:
            ask(engine, done)

    def add_model(self, model: int, eos_token_ids: tuple[int, ...], grammars: Grammars | None) -> None:
        engine, there = self._home(model)
        if there:
            engine.add_model(there, eos_token_ids, grammars)

    def remove_model(self, model: int) -> None:
        engine, there = self._home(model)
        if there:
            engine.remove_model(there)
        self._engine_of.pop(model, None)

    def in_use(self, kind: WeightsKind) -> set[int]:
        if kind is WeightsKind.ADAPTER:
            return self.first.in_use(kind)
        return {model or own for engine, own in list(self._own.items()) for model in engine.in_use(kind)}

    def stats(self) -> EngineStats:
        """The sums over all engines. The sampled steps are those of the first."""
        engines = self._all
        found = [engine.stats() for engine in engines]
        for engine, stats in zip(engines, found, strict=True):
            own = self._own.get(engine, 0)
            for name in ("models", "running_of_models", "waiting_of_models"):
                setattr(stats, name, {model or own: value for model, value in getattr(stats, name).items()})
        return replace(total_of(found), recent_steps=found[0].recent_steps)


AnyEngine = Engine | Engines
