"""An engine whose text the tests choose: it says the reply it was built with, or its prompt over and over.

It keeps the manners of `batcher.engine.Engine`: callbacks from a thread of its own, one token for each request and
step, exactly one last output for each request, the same errors.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from batcher.change import Change, OnDone, PauseMode
from batcher.delivery import Tokens
from batcher.errors import InvalidRequestError, QueueFullError
from batcher.request import FinishReason, Request, RequestOutput, TokenLogprobs
from batcher.stats import EngineStats
from batcher.step import WeightsKind
from batcher.step_log import StepRecord
from server.engine.process import BuiltEngine
from server.engine.weight_changes import WeightChanges
from server.engine.wire import WEIGHTS, ChangeWeights, EngineInfo, InSharedMemory, WeightsChange
from tests.server.support.adapters import FakeStore, fake_adapters
from tests.server.support.tokenizers import EOT, VOCAB_SIZE
from tests.server.support.weights import missing_after

PROGRAM_OBJECTS = 100_000  # of a program that comes while it serves


@dataclass(frozen=True, kw_only=True)
class EchoConfig:
    reply: tuple[int, ...] | None = None  # None: the prompt
    replies: tuple[tuple[int, ...], ...] = ()  # of requests with a seed: the one of that index
    step_s: float = 0.0  # pause between steps
    max_model_len: int = 4096
    max_live: int = 1000
    tokens_per_step: int = 1
    start_s: float = 0.0
    fail_at_start: str | None = None
    die_after_tokens: int | None = None
    weights: bool = False  # it can change them: its reply is then the name of the model
    says_heap: bool = False  # its reply is then the number of the objects that its process has frozen
    num_programs_to_come: int = 0  # at first; each look at the statistics finds one less, and more objects
    refused: tuple[str | None, ...] = ()  # models that cannot be loaded; None: that of the start
    uncommittable: tuple[str, ...] = ()  # models that are loaded, and cannot take the place of others
    no_room: tuple[str, ...] = ()  # for these parts once they sleep
    adapters: FakeStore | None = None  # of LoRA adapters, whose requests' reply is their weights
    modules: tuple[tuple[str, str], ...] = ()  # names and folders of the adapters of the start


class _Running:
    def __init__(
        self, request: Request, on_output: Callable[[RequestOutput], None], reply: tuple[int, ...], number: int
    ) -> None:
        self.number = number
        self.request = request
        self.on_output = on_output
        self.reply = reply
        self.num_tokens = 0


class EchoEngine:
    def __init__(self, config: EchoConfig) -> None:
        self._config = config
        self._live: dict[str, _Running] = {}
        self._lock = threading.Condition()
        self._stopping = threading.Event()
        self._num_steps = 0
        self._num_tokens = 0
        self._num_programs_to_come = config.num_programs_to_come
        self._programs: list[list[list[int]]] = []
        self._finished: dict[str, int] = {}
        self.death: BaseException | None = None
        self._on_tokens: Callable[[Tokens], None] | None = None
        self._num_accepted = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def listen(self, on_tokens: Callable[[Tokens], None]) -> None:
        self._on_tokens = on_tokens

    def add_request(self, request: Request, on_output: Callable[[RequestOutput], None]) -> None:
        if request.sampling.min_tokens > request.sampling.max_tokens:
            raise InvalidRequestError("min_tokens", "too many")
        with self._lock:
            if len(self._live) >= self._config.max_live:
                raise QueueFullError("the queue is full: 0 requests wait already; try again later")
            reply = self._reply(request)
            self._live[request.request_id] = _Running(request, on_output, reply, self._num_accepted)
            self._num_accepted += 1
            self._lock.notify()

    def _reply(self, request: Request) -> tuple[int, ...]:
        if self._config.replies and request.sampling.seed is not None:
            return self._config.replies[request.sampling.seed]
        if self._config.says_heap:
            return tuple(str(gc.get_freeze_count()).encode())
        if request.adapter:
            return tuple(self._config.adapters.texts[request.adapter].encode())
        return request.prompt if self._config.reply is None else self._config.reply

    def in_use(self, kind: WeightsKind) -> set[int]:
        return set(self._adapters())

    def _adapters(self) -> list[int]:
        with self._lock:
            return [running.request.adapter for running in self._live.values()]

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        with self._lock:
            running = self._live.pop(request_id, None)
        if running is not None:
            self._end(running, RequestOutput(request_id=request_id, number=running.number, finish_reason=reason))

    def reset_prefix_cache(self, *, reset_external: bool) -> None:
        """It keeps no prefixes."""

    def stats(self) -> EngineStats:
        live = len(self._live)
        if self._num_programs_to_come:
            self._num_programs_to_come -= 1
            self._programs.append([[i] for i in range(PROGRAM_OBJECTS)])
        return EngineStats(
            num_programs_to_come=self._num_programs_to_come,
            recent_steps=[StepRecord(self._num_steps, time.monotonic(), "ECHO", live, live, "d" * live)],
            num_requests_running=live,
            num_steps=self._num_steps,
            generation_tokens=self._num_tokens,
            finished=dict(self._finished),
            num_pages=100,
            num_pages_used=live,
            running_of_adapters=dict(Counter(adapter for adapter in self._adapters() if adapter)),
        )

    def shutdown(self) -> None:
        self._stopping.set()
        with self._lock:
            self._lock.notify()
        self._thread.join()
        for request_id in list(self._live) if self.death is None else ():
            self.abort(request_id)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                self._lock.wait_for(lambda: self._live or self._stopping.is_set())
                batch = list(self._live.values())
            self._num_steps += 1
            for running in batch:
                self._step(running)
            if self._config.die_after_tokens is not None and self._num_tokens >= self._config.die_after_tokens:
                self.death = RuntimeError("the device has gone")
                return
            self._stopping.wait(self._config.step_s)

    def _step(self, running: _Running) -> None:
        request, sampling = running.request, running.request.sampling
        if request.adapter:
            assert request.adapter in self._config.adapters.texts, "the weights of a running request are forgotten"
        ids: list[int] = []
        finish = None
        for _ in range(self._config.tokens_per_step):
            at = running.num_tokens
            scripted = (self._config.reply is not None or self._config.says_heap) and not sampling.ignore_eos
            token = EOT if scripted and at >= len(running.reply) else running.reply[at % len(running.reply)]
            ids.append(token)
            running.num_tokens += 1
            if token in sampling.stop_token_ids or (token == EOT and scripted):
                finish = FinishReason.STOP
            elif running.num_tokens >= sampling.max_tokens:
                finish = FinishReason.LENGTH
            if finish:
                break
        self._num_tokens += len(ids)
        first = running.num_tokens == len(ids)
        scored = sampling.logprobs is not None or sampling.logprob_token_ids
        sampled = sampling.sampled_logprobs
        output = RequestOutput(
            request_id=request.request_id,
            number=running.number,
            token_ids=tuple(ids),
            logprobs=tuple(_scores(id, sampling.logprobs or 0, sampling.logprob_token_ids) for id in ids)
            if scored
            else (),
            sampled_logprobs=tuple(map(sampled_logprob, ids)) if sampled else (),
            prompt_logprobs=(
                tuple(_scores(id, sampling.prompt_logprobs) for id in request.prompt[1:])
                if first and sampling.prompt_logprobs is not None
                else None
            ),
            finish_reason=finish,
            stop_reason=ids[-1] if ids[-1] in sampling.stop_token_ids else None,
        )
        if finish is None:
            with self._lock:  # nothing comes after an abort's output
                if request.request_id in self._live:
                    self._tell(running, output, is_plain=not (first or scored or sampled))
            return
        with self._lock:
            still_live = self._live.pop(request.request_id, None)
        if still_live is not None:
            self._end(running, output)

    def _tell(self, running: _Running, output: RequestOutput, *, is_plain: bool) -> None:
        if self._on_tokens is None or not is_plain:
            running.on_output(output)
            return
        ids = output.token_ids
        counts = None if len(ids) == 1 else np.array([len(ids)], np.int32)
        self._on_tokens(Tokens(np.array([running.number]), np.array(ids, np.int32), counts))

    def _end(self, running: _Running, output: RequestOutput) -> None:
        reason = output.finish_reason.value
        self._finished[reason] = self._finished.get(reason, 0) + 1
        running.on_output(output)


class ChangingEchoEngine(EchoEngine):
    """A pause ends all requests."""

    def reply_with(self, name: str | None) -> None:
        self._config = replace(self._config, reply=None if name is None else tuple(name.encode()))

    def change(self, change: Change) -> None:
        try:
            change.work()
        except ValueError as error:
            change.on_done(error)
        else:
            change.on_done(None)

    def pause(self, mode: PauseMode, clear_cache: bool, on_done: OnDone) -> None:
        for request_id in list(self._live):
            self.abort(request_id)
        on_done(None)

    def resume(self, on_done: OnDone) -> None:
        on_done(None)


class EchoWeights:
    """`server.engine.weight_changes.Weights`: the new reply is the name of the model, or of the block."""

    def __init__(self, config: EchoConfig, reply_with: Callable[[str | None], None]) -> None:
        self.missing: Set[str] = frozenset()
        self._config = config
        self._reply_with = reply_with
        self._block: str | None = None
        self._change = ChangeWeights(WeightsChange.WAKE_UP)

    def receive(self, source: InSharedMemory) -> None:
        self._block = source.block

    def forget(self) -> None:
        self._block = None

    def check(self, change: ChangeWeights) -> Mapping[str, str]:
        if change.change is WeightsChange.UPDATE:
            change = msgspec.structs.replace(change, model=self._block)
            if self._block is None:
                raise ValueError("nothing has been received")
        if change.change is WeightsChange.RELOAD and WEIGHTS in self.missing:
            raise ValueError("the engine sleeps")
        self._change = change
        return {}

    def prepare(self) -> None:
        change, after = self._change, missing_after(self.missing, self._change)
        if change.change is WeightsChange.WAKE_UP and not after >= self.missing & set(self._config.no_room):
            raise ValueError("there is no room")
        self._refuse(self._config.refused)

    def commit(self) -> None:
        change = self._change
        self._refuse(self._config.uncommittable)
        if change.change in (WeightsChange.RELOAD, WeightsChange.UPDATE):
            self._reply_with(change.model)
        self.missing = missing_after(self.missing, change)

    def abandon(self) -> None: ...

    def _refuse(self, models: tuple[str | None, ...]) -> None:
        if self._change.change in (WeightsChange.RELOAD, WeightsChange.UPDATE) and self._change.model in models:
            raise ValueError(f"no model {self._change.model}")


def _scores(token_id: int, num_top: int, asked: tuple[int, ...] = ()) -> TokenLogprobs:
    """The token itself first, with -0.5, then its neighbours; the last of twenty is impossible. Or those that are asked
    for, each with minus its own number."""
    if asked:
        return TokenLogprobs(
            logprob=-0.5, top_ids=asked, top_logprobs=tuple(map(float.__neg__, map(float, asked))), rank=1
        )
    ids = [(token_id + i) % VOCAB_SIZE for i in range(num_top)]
    values = [-0.5 - i if i < 19 else float("-inf") for i in range(num_top)]
    return TokenLogprobs(logprob=-0.5, top_ids=tuple(ids), top_logprobs=tuple(values), rank=1)


def sampled_logprob(token_id: int) -> float:
    """Infinite for the byte 0, which no distribution gives."""
    return -token_id / 1024 if token_id else float("-inf")


def build(config: EchoConfig, report: Callable[[str], None]) -> BuiltEngine:
    report("the echo engine is loading")
    time.sleep(config.start_s)
    if config.fail_at_start:
        raise ValueError(config.fail_at_start)
    info = EngineInfo(
        max_model_len=config.max_model_len,
        vocab_size=VOCAB_SIZE,
        cache_config={"page_size": "16", "enable_prefix_caching": "True"},
        max_loras=0 if config.adapters is None else 4,
    )
    if config.weights:
        changing = ChangingEchoEngine(config)
        weights = WeightChanges(changing, EchoWeights(config, changing.reply_with))
        return BuiltEngine(engine=changing, info=info, weights=weights)
    engine = EchoEngine(config)
    adapters = None if config.adapters is None else fake_adapters(engine, config.adapters, config.modules)
    return BuiltEngine(engine=engine, info=info, adapters=adapters)
