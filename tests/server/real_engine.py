"""The real engine over the numpy runner, as the engine process builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.step import Capacity
from server.wire import EngineInfo
from tests.batcher.fake_runner import FakeRunner
from tests.server.tokenizers import EOT, VOCAB_SIZE

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


def build(config: RealConfig, report: Callable[[str], None]) -> tuple[Engine, EngineInfo]:
    def on_result(number: int) -> None:
        if number == config.broken_at:
            raise RuntimeError("the device has stumbled")

    runner = FakeRunner(CAPACITY, nan_token=config.nan_token, on_result=on_result, healthy=config.healthy)
    ladder = BucketLadder(BucketConfig(max_num_batched_tokens=64, max_num_seqs=8))
    engine = Engine(runner, EngineConfig(eos_token_ids=(EOT,), max_waiting=config.max_waiting), ladder)
    engine.warm_up(report)
    return engine, EngineInfo(max_model_len=CAPACITY.max_model_len, vocab_size=VOCAB_SIZE)
