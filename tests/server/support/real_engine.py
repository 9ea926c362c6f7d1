"""The real engine over the numpy runner, as the engine process builds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.request import FinishReason, Pooling
from batcher.step import Capacity
from server.engine.process import BuiltEngine
from server.engine.weight_changes import WeightChanges
from server.engine.wire import EngineInfo
from tests.batcher.fake_runner import FAKE_HIDDEN, FakeRunner
from tests.server.support.adapters import FakeStore, fake_adapters
from tests.server.support.tokenizers import EOT, VOCAB_SIZE
from tests.server.support.weights import FakeWeights, WeightedRunner, Weights

CAPACITY = Capacity(
    num_slots=8,
    num_pages=64,
    page_size=16,
    max_model_len=512,
    max_num_batched_tokens=64,
    vocab_size=VOCAB_SIZE,
)


@dataclass(frozen=True, kw_only=True)
class RealConfig:
    max_waiting: int = 1024
    nan_token: int | None = None
    broken_at: int | None = None  # the step whose result raises
    healthy: bool = True
    pooling: Pooling | None = None
    held_at: int | None = None  # the step whose result waits until a request is aborted
    step_timeout_s: float | None = None
    adapters: FakeStore | None = None  # of LoRA adapters, of which two run at once
    weights: FakeWeights | None = None  # they can be changed


class _Engine(Engine):
    """Says when the first request is aborted."""

    def __init__(self, aborted: threading.Event, *args) -> None:
        super().__init__(*args)
        self._first_abort = aborted

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        super().abort(request_id, reason)
        self._first_abort.set()


def build(config: RealConfig, report: Callable[[str], None]) -> BuiltEngine:
    aborted = threading.Event()

    def on_result(number: int) -> None:
        if number == config.broken_at:
            raise RuntimeError("the device has stumbled")
        if number == config.held_at:
            assert aborted.wait(30)

    max_loras = 0 if config.adapters is None else 2
    capacity = replace(CAPACITY, pooling=config.pooling, max_loras=max_loras)
    make = FakeRunner if config.weights is None else WeightedRunner
    runner = make(capacity, nan_token=config.nan_token, on_result=on_result, healthy=config.healthy)
    embeds = config.pooling is not None
    ladder = BucketLadder(
        BucketConfig(max_num_batched_tokens=64, max_num_seqs=8, embeds=embeds, adapters=max_loras > 0)
    )
    engine_config = EngineConfig(
        eos_token_ids=(EOT,), max_waiting=config.max_waiting, step_timeout_s=config.step_timeout_s
    )
    engine = _Engine(aborted, runner, engine_config, ladder)
    engine.warm_up(report)
    info = EngineInfo(
        max_model_len=CAPACITY.max_model_len,
        vocab_size=VOCAB_SIZE,
        embedding_size=None if config.pooling is None else FAKE_HIDDEN,
        max_loras=max_loras,
        adapter_bytes=1000,
    )
    return BuiltEngine(
        engine=engine,
        info=info,
        adapters=None if config.adapters is None else fake_adapters(engine, config.adapters),
        weights=None if config.weights is None else WeightChanges(engine, Weights(runner, config.weights)),
    )
