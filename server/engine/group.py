"""Several engines behind one server. Each has its own process, chips and pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest

from batcher.request import FinishReason
from batcher.stats import EngineStats, total_of
from server.engine import wire
from server.engine.protocol import Engine, EngineFailedError, Receiver
from server.engine.remote import RemoteEngine
from server.engine.routing import Route, Router
from server.shared_counts import Load, Row

OTHER_WEIGHTS = "it finds other weights there than the engines before it"
DECIDE_S = wire.HOLD_S - 60  # a group decides on a change before one of its engines abandons it


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    """A request that has no output yet."""

    engine: int
    num_missing: int  # tokens of its prompt that are to be computed
    route: Route | None = None  # None: another request has chosen the engine


type ServerEngine = RemoteEngine | EngineGroup


class EngineGroup(Engine):
    """An `Engine` over several engines that serve the same model. The engines may be groups.

    All requests of one HTTP request go to the same engine, so its choices share their prompt. When an engine dies, only
    its own requests end with an error. The group then counts as dead and takes no more requests.

    All engines are prepared for a change before one commits, and all engines pause together. `split` is set if only
    some engines have committed. The group is dead then, although engines live: an answer would depend on the engine
    that gives it.

    Args:
        row: this process's row of the shared counts, by which all processes see the load of the engines; None: there
            is one process only.
    """

    def __init__(self, engines: Sequence[ServerEngine], router: Router | None = None, row: Row | None = None) -> None:
        super().__init__()
        self.info = wire.EngineInfo(max_model_len=0, vocab_size=0)
        self.died = asyncio.Event()
        self.on_output: Callable[[wire.Output], None] = lambda output: None  # gets each before the request's receiver
        self.engines = engines
        self._router = router or Router()
        self._row = row
        self._sent: dict[str, _Sent] = {}  # by request id
        self._num_queued = [0] * len(engines)  # tokens, for `Load.num_queued`
        for engine in engines:
            engine.on_output = self._hear
        self._watchers: list[asyncio.Task[None]] = []
        self._adapters, self._models = _InAll[wire.Adapter](), _InAll[wire.LoadedModel]()
        self.split: str | None = None

    async def start(self) -> wire.EngineInfo:
        """Waits until all engines are ready. Raises EngineFailedError if one cannot start, or if they differ."""
        starting = [asyncio.create_task(engine.start()) for engine in self.engines]
        try:
            infos = await asyncio.gather(*starting)
        except EngineFailedError as error:
            number = next(i for i, task in enumerate(starting) if task.done() and task.exception() is error)
            raise error.after(f"engine {number}") from error
        finally:
            for task in starting:
                if not task.cancel() and not task.cancelled():
                    task.exception()  # seen: asyncio logs unseen errors, of a second engine that failed, too
        lengths = {(info.max_model_len, info.vocab_size) for info in infos}
        if len(lengths) > 1:
            raise EngineFailedError(f"the engines differ in context length or vocabulary: {sorted(lengths)}")
        self._watchers = [asyncio.create_task(self._watch(engine)) for engine in self.engines]
        self.info = infos[0]
        cache = self.info.cache_config
        self._router.page_size = int(cache["page_size"]) if cache.get("enable_prefix_caching") == "True" else 0
        return self.info

    @property
    def stats(self) -> EngineStats:
        return total_of([engine.stats for engine in self.engines])

    @property
    def adapters(self) -> Mapping[str, wire.Adapter]:
        """The LoRA adapters that all engines have, by name. During a change some engines may not have reported it."""
        return self._adapters.of([engine.adapters for engine in self.engines])

    @property
    def models(self) -> Mapping[str, wire.LoadedModel]:
        """The models that all engines have, by name."""
        return self._models.of([engine.models for engine in self.engines])

    @property
    def num_adapter_loads(self) -> int:
        return sum(engine.num_adapter_loads for engine in self.engines)

    @property
    def weight_version(self) -> str:
        """The version of the first engine's weights. During a change other engines may still have another one."""
        return self.engines[0].weight_version

    @property
    def death(self) -> str | None:
        deaths = [f"engine {i}: {engine.death}" for i, engine in enumerate(self.engines) if engine.death is not None]
        return "; ".join(filter(None, (*deaths, self.split))) or None

    @property
    def missing(self) -> Set[str]:
        return {part for engine in self.engines for part in engine.missing}

    @property
    def is_paused(self) -> bool:
        return all(engine.is_paused for engine in self.engines)

    @property
    def replicas(self) -> Sequence[RemoteEngine]:
        """The engines of the group and of its groups."""
        return [replica for engine in self.engines for replica in engine.replicas]

    @property
    def num_open(self) -> int:
        return sum(engine.num_open for engine in self.engines)

    @property
    def last_heartbeat(self) -> float:
        """The heartbeat of the engine that has been silent for longest."""
        return min([engine.last_heartbeat for engine in self.engines])

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Receiver]]) -> None:
        first, _ = requests[0]
        route = self._router.choose(first.prompt, first.cache_salt ^ first.adapter ^ first.model, self._loads())
        number = route.engine
        self._sent[first.request_id] = _Sent(engine=number, num_missing=route.num_missing, route=route)
        for other, _ in requests[1:]:  # an empty prompt is the one before
            self._sent[other.request_id] = _Sent(engine=number, num_missing=wire.num_packed(other.prompt))
        self._add_queued(number, sum(self._sent[request.request_id].num_missing for request, _ in requests))
        self.engines[number].submit(requests)

    def _hear(self, output: wire.Output) -> None:
        self.on_output(output)
        sent = self._leave_queue(output.request_id)
        if sent is not None and sent.route is not None and (output.token_ids or output.embedding is not None):
            has_looked = output.prompt_logprobs is None and output.embedding is None
            self._router.learn(sent.route, output.num_cached_tokens if has_looked else None)

    def _leave_queue(self, request_id: str) -> _Sent | None:
        """Removes a request from the queue at its first output or its end. Returns None if it had left before."""
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self._add_queued(sent.engine, -sent.num_missing)
        return sent

    def _add_queued(self, engine: int, tokens: int) -> None:
        self._num_queued[engine] += tokens
        if self._row is not None:
            self._row.set_queued(engine, self._num_queued[engine])

    def _loads(self) -> Mapping[int, Load]:
        if self._row is not None:
            return dict(enumerate(self._row.loads()))
        pairs = zip(self.engines, self._num_queued, strict=True)
        return {number: Load(engine.num_open, tokens) for number, (engine, tokens) in enumerate(pairs)}

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        for request_id in request_ids:
            self._leave_queue(request_id)
        for engine in self.engines:  # each ignores the ids of the others
            engine.abort(request_ids, reason)

    def reset_prefix_cache(self, *, reset_external: bool) -> None:
        self._router.forget()
        for engine in self.engines:
            engine.reset_prefix_cache(reset_external=reset_external)

    def abort_all(self) -> None:
        for engine in self.engines:
            engine.abort_all()

    async def stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    async def _watch(self, engine: ServerEngine) -> None:
        await engine.died.wait()
        self.died.set()

    async def _ask(self, question: wire.EngineQuestion) -> wire.Reply:
        """Asks all engines. If some refuse, the reply's error names them."""
        asked = time.monotonic()
        done, refused = await self._ask_each(dict.fromkeys(range(len(self.engines)), question))
        first = next(iter(done.values()), wire.Reply())
        match question:
            case wire.Pause(clear_cache=True) if not refused:
                self._router.forget()
            case wire.UpdateWeights(step=wire.UpdateStep.BEGIN) if refused:
                await self._ask_each(dict.fromkeys(done, wire.UpdateWeights(wire.UpdateStep.ABANDON)))
            case wire.ChangePhase(phase=wire.Phase.PREPARE, change=change):
                for number, reply in done.items():
                    if reply.loaded != first.loaded:
                        refused[number] = wire.Reply(error=OTHER_WEIGHTS)
                if time.monotonic() - asked > DECIDE_S and isinstance(change, wire.ChangeWeights):
                    late = wire.Reply(error=f"not all engines were prepared within {DECIDE_S:.0f} s")
                    refused |= dict.fromkeys(done, late)
                if refused:  # an engine that dies meanwhile ends the server
                    await self._ask_each(dict.fromkeys(done, wire.ChangePhase(wire.Phase.ABANDON, change)))
            case wire.ChangePhase(phase=wire.Phase.COMMIT, change=change):
                if refused and done:
                    self.split = f"not all engines have made the change: {_listed(refused)}"
                    self.died.set()
                elif not refused and isinstance(change, wire.ChangeWeights):
                    self._router.forget()  # the prefix caches are empty
        if not refused:
            return wire.Reply(loaded=first.loaded)
        told = {reply.error for reply in refused.values()}
        is_same = len(refused) == len(self.engines) and len(told) == 1
        error = told.pop() if is_same else _listed(refused)
        return wire.Reply(error=error, status=refused[min(refused)].status)

    async def _ask_each(
        self, questions: Mapping[int, wire.EngineQuestion]
    ) -> tuple[dict[int, wire.Reply], dict[int, wire.Reply]]:
        """Asks engines. Returns the replies and the refusals, by engine number."""
        replies = await asyncio.gather(*(self.engines[number].ask(question) for number, question in questions.items()))
        done, refused = dict[int, wire.Reply](), dict[int, wire.Reply]()
        for number, reply in zip(questions, replies, strict=True):
            (done if reply.error is None else refused)[number] = reply
        return done, refused


class _InAll[T]:
    """What all engines have told under the same name."""

    def __init__(self) -> None:
        self._told: Sequence[Mapping[str, T]] = ()
        self._known: Mapping[str, T] = {}

    def of(self, now: Sequence[Mapping[str, T]]) -> Mapping[str, T]:
        """The items that are the same in all mappings."""
        if any(new is not old for new, old in zip_longest(now, self._told)):
            first, *others = self._told = now
            self._known = {name: own for name, own in first.items() if all(each.get(name) == own for each in others)}
        return self._known


def _listed(refused: Mapping[int, wire.Reply]) -> str:
    return "; ".join(f"engine {number}: {reply.error}" for number, reply in sorted(refused.items()))


def spawn_engines(
    target: str,
    engine_args: Sequence[object],
    *,
    report: Callable[[str], None],
    debug: bool = False,
    router: Router | None = None,
) -> ServerEngine:
    """Starts engines, each in its own process. Returns the engine, or a group of several.

    Args:
        target: the factory of the engines, as "package.module:function".
        engine_args: the argument of the factory, for each engine.
        report: called with each line about the start.
        router: chooses an engine for each request, if there are several; None: the usual one.
    """
    if len(engine_args) == 1:
        return RemoteEngine.spawn(target, engine_args[0], report=report, debug=debug)
    engines = [
        RemoteEngine.spawn(target, args, report=_named(number, report), debug=debug)
        for number, args in enumerate(engine_args)
    ]
    return EngineGroup(engines, router)


def _named(number: int, report: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: report(f"engine {number}: {line.strip()}")
