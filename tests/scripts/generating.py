"""scripts.generate as a process of its own, over the fake runner:

    python -m tests.scripts.generating COUNT SIGNAL FLAGS

When COUNT records are in the journal, the process sends itself SIGNAL.
"""

import os
import signal
import sys
from typing import Any

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.step import Capacity
from scripts import generate
from scripts import llm as llm_module
from scripts.offline.journal import Journal
from server.engine.wire import EngineInfo
from tests.batcher.fake_runner import FakeRunner

CAPACITY = Capacity(
    num_slots=4, num_pages=64, page_size=16, max_model_len=256, max_num_batched_tokens=32, vocab_size=1024
)


def build_fake(max_waiting: int, report, **runner_options: object) -> tuple[Engine, EngineInfo]:
    """As `scripts.wiring.engine.build`; the options are the fake runner's."""
    ladder = BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=4))
    config = EngineConfig(eos_token_ids=(777,), max_waiting=max_waiting, seed=0)
    engine = Engine(FakeRunner(CAPACITY, **runner_options), config, ladder)
    engine.warm_up(report)
    return engine, EngineInfo(max_model_len=CAPACITY.max_model_len, vocab_size=CAPACITY.vocab_size)


class SignallingJournal(Journal):
    num_left: int
    signal: signal.Signals

    def add(self, *arguments: Any) -> None:
        super().add(*arguments)
        type(self).num_left -= 1
        if self.num_left == 0:
            os.kill(os.getpid(), self.signal)


def main() -> int:
    count, name, *flags = sys.argv[1:]
    SignallingJournal.num_left, SignallingJournal.signal = int(count), signal.Signals[name]
    generate.Journal = SignallingJournal
    llm_module.build = lambda settings, report, tokenizer: build_fake(settings.max_queue, report)
    return generate.main(["--load-format", "dummy", "--served-model-name", "m", *flags])


if __name__ == "__main__":
    sys.exit(main())
