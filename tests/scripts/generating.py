"""scripts.generate as a process of its own, over the fake runner:

    python -m tests.scripts.generating COUNT SIGNAL FLAGS

When COUNT records are in the journal, the process sends itself SIGNAL. The device gives no results between SIGINT and
the engine's end, so that the interrupt finds requests that run.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.request import Pooling, Request, SamplingParams
from batcher.step import Capacity
from scripts import generate
from scripts import llm as llm_module
from scripts.offline.journal import Journal
from server.engine.wire import EngineInfo
from tests.batcher.fake_runner import FAKE_HIDDEN, FakeRunner, expected_embedding

CAPACITY = Capacity(
    num_slots=4, num_pages=64, page_size=16, max_model_len=256, max_num_batched_tokens=32, vocab_size=1024
)


def build_fake(
    max_waiting: int, report, *, pooling: Pooling | None = None, **runner_options: object
) -> tuple[Engine, SimpleNamespace]:
    """As `scripts.building.build.build`, without adapters; the other options are the fake runner's."""
    ladder = BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=4, embeds=pooling is not None))
    config = EngineConfig(eos_token_ids=(777,), max_waiting=max_waiting, seed=0)
    runner = FakeRunner(replace(CAPACITY, pooling=pooling), **runner_options)
    engine = Engine(runner, config, ladder)
    engine.warm_up(report)
    info = EngineInfo(
        max_model_len=CAPACITY.max_model_len,
        vocab_size=CAPACITY.vocab_size,
        embedding_size=None if pooling is None else FAKE_HIDDEN,
    )
    return engine, built_of(info, runner)


def built_of(info: EngineInfo, runner: FakeRunner | None) -> SimpleNamespace:
    """What an LLM needs of `scripts.building.runner.Built`. All parts are on the device."""
    return SimpleNamespace(info=info, runner=runner, runner_weights=lambda: SimpleNamespace(missing=frozenset()))


def foretold(prompt: Sequence[int], pooling: Pooling) -> list[float]:
    """The embedding of the fake runner, from the prompt alone."""
    request = Request(request_id="", prompt=tuple(prompt), sampling=SamplingParams(max_tokens=1), embeds=True)
    return expected_embedding(request, pooling).tolist()


class SignallingJournal(Journal):
    num_left: int
    signal: signal.Signals
    goes_on = threading.Event()  # the device gives results
    goes_on.set()

    def add(self, *arguments: Any) -> None:
        super().add(*arguments)
        type(self).num_left -= 1
        if self.num_left == 0:
            if self.signal == signal.SIGINT:
                self.goes_on.clear()
            os.kill(os.getpid(), self.signal)


def killed(flags: Sequence[str], errors: Path, *, record: int = 0, name: str = "SIGKILL", event: int = 0) -> None:
    """The body of a process, for `multiprocessing`. Its exit code is the command's.

    Args:
        flags: the last one is the output.
        errors: the file for what it says.
        record: the process sends itself the signal `name` when it has written so many records; 0: never.
        event: the process kills itself before it opens, renames or removes a file of the output for so many times; 0:
            never.
    """
    num_events = 0

    def hear(what: str, arguments: tuple[object, ...]) -> None:
        nonlocal num_events
        if what in ("open", "os.rename", "os.remove") and str(arguments[0]).startswith(flags[-1]):
            num_events += 1
            if num_events == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    sys.stderr = errors.open("w", buffering=1)
    sys.argv[1:] = [str(record), name, *flags]
    sys.exit(main())


def main() -> int:
    goes_on = SignallingJournal.goes_on

    def build(served, report, tokenizer, **_: object) -> tuple[Engine, SimpleNamespace, None]:
        engine, built = build_fake(served.engine.max_queue, report, on_result=lambda _: goes_on.wait())
        shutdown = engine.shutdown

        def go_on_and_end() -> None:
            goes_on.set()
            shutdown()

        engine.shutdown = go_on_and_end
        return engine, built, None

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    count, name, *flags = sys.argv[1:]
    SignallingJournal.num_left, SignallingJournal.signal = int(count), signal.Signals[name]
    generate.Journal = SignallingJournal
    llm_module.build = build
    return generate.main(["--load-format", "dummy", "--served-model-name", "m", *flags])


if __name__ == "__main__":
    sys.exit(main())
