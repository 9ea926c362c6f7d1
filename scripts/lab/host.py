"""What the host costs per step: scheduling, packing, taking results in and sending them, without a device.

    python -m scripts.lab host [--rows 64 256 1024] [--steps 2000] [--arrivals] [--context 200]
    python -m scripts.lab host --tiers off host disk [--arrivals]
    python -m scripts.lab host --targets [--arrivals]

A runner that answers at once replaces the model, so only the host's work is measured. Prints microseconds of CPU time
per step: of each part, and of the parts together, the median, the mean and the 99th percentile. `send` is what the
sender's thread does: the message to the HTTP process is made, encoded and given to ZeroMQ. `moves` is what the engine's
thread does for pages that leave the device and come back, apart from its share of the other parts. `--arrivals`
replaces every finished request by a new one, which adds admissions and prompt chunks; without it the rows only decode.
`--waiting` adds a request whose prompt, of so many tokens, is fully cached, and which waits for room for its output.

The `--tiers` take turns of TURN steps: `off`, `host` (pages that are evicted go to the host's memory) and `disk` (with
files behind it, which take no time here: every page is saved when it is full). Rows that only decode evict nothing, so
nothing moves in `host`. With `--arrivals` prompts repeat when the device has lost them: `off` computes them, and the
others have them in the host's memory. A step takes STEP_S by the engine's clock, so loading pays.

With `--targets`, an engine whose requests have the latency targets TARGETS takes turns with one without.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec
import numpy as np
import zmq

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.page_store import Offloading
from batcher.request import Request, RequestOutput, SamplingParams, Targets
from batcher.scheduling.page_moves import OffloadingCounts
from batcher.step import Capacity
from scripts.lab.load.tiers import Tier
from scripts.lab.simulation.instant_runner import InstantRunner
from scripts.lab.tables import Table, say, say_head
from server.engine import outbox
from server.flag import EachCounts

PAGE_SIZE = 16
BUDGET = 2048
WARM_UP_STEPS = 100
TURN = 500  # steps
STEP_S = 0.02
TARGETS = Targets(itl_ms=50, ttft_ms=500)
PAGE_BYTES, PAGES_OF_COPY = 64, 64  # the bytes are no work of the engine's thread
ADDRESS = "inproc://outputs"


class Sender:
    """Sends what the engine says as the engine process does, and drops it at the other end."""

    def __init__(self) -> None:
        self.items: list[outbox.Item] = []
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reader = self._context.socket(zmq.PULL)
        self._reader.bind(ADDRESS)
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.connect(ADDRESS)

    def send(self) -> int:
        """Sends all items; returns the number of messages."""
        items, self.items = self.items, []
        count = 0
        for message in outbox.messages(items):
            self._socket.send(self._encode(message))
            count += 1
        return count

    def drop(self, count: int) -> None:
        """Reads so many messages."""
        for _ in range(count):
            self._reader.recv()

    def close(self) -> None:
        self._context.destroy(linger=0)


class Timed:
    """Adds up the CPU time of the calls of methods, by part of the step."""

    def __init__(self) -> None:
        self.now: defaultdict[str, float] = defaultdict(float)

    def wrap(self, part: str, owner: Any, *names: str) -> None:
        """Times these methods from now on. None of them calls another one of the part."""
        for name in names:
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: object) -> object:
            start = time.thread_time()
            result = method(*args)
            self.now[part] += time.thread_time() - start
            return result

        return timed

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken, self.now = self.now, defaultdict(float)
        return taken


@dataclass(frozen=True, slots=True)
class Figures:
    """Microseconds of CPU time per step."""

    median: float
    mean: float
    p99: float

    def __str__(self) -> str:
        return f"{self.median:.0f} ({self.mean:.0f}, {self.p99:.0f})"


TIERS = (Tier.OFF, Tier.HOST, Tier.DISK)
PARTS = ("schedule", "moves", "pack", "complete", "send")


class Bench:
    """Rows on an engine whose steps take no time, and the seconds of each part of its steps."""

    def __init__(
        self,
        num_rows: int,
        num_steps: int,
        tier: Tier,
        targets: Targets | None,
        *,
        arrivals: bool,
        context: int,
        waiting: int,
    ) -> None:
        self._arrivals, self._waiting = arrivals, waiting
        self._random = np.random.default_rng(0)
        self._max_tokens = 200 if arrivals else num_steps + 1000
        max_model_len = max(context, waiting) + 100 + self._max_tokens
        row_pages = num_rows * -(-(context + self._max_tokens) // PAGE_SIZE)
        num_prompts = 2 * num_rows if arrivals else num_rows
        capacity = Capacity(
            num_slots=num_rows + 1,
            num_pages=max(row_pages + waiting // PAGE_SIZE // 2, -(-max_model_len // PAGE_SIZE)),
            page_size=PAGE_SIZE,
            max_model_len=max_model_len,
            max_num_batched_tokens=BUDGET,
            vocab_size=32000,
            page_bytes=PAGE_BYTES,
            pages_of_copy=PAGES_OF_COPY,
        )
        self._prompts = [self._prompt(context) for _ in range(num_prompts)]
        store = _InstantStore() if tier is Tier.DISK else None
        offloading = None if tier is Tier.OFF else Offloading(host_bytes=2 * row_pages * PAGE_BYTES, store=store)
        self._now_s = 0.0
        self._engine = Engine(
            InstantRunner(capacity),
            EngineConfig(eos_token_ids=(1, 2, 3), seed=0, offloading=offloading, targets=targets),
            BucketLadder(BucketConfig(max_num_batched_tokens=BUDGET, max_num_seqs=num_rows + 1)),
            clock=lambda: self._now_s,
        )
        self._engine.warm_up(lambda _line: None)
        self._sender = Sender()
        self._engine.listen(lambda tokens: self._sender.items.append(tokens))
        self._num_submitted = self._num_ended = 0
        self.steps: list[dict[str, float]] = []  # seconds of each part
        self._fill(num_rows)
        self._timed, core, mover = Timed(), self._engine.core, self._engine._page_mover
        self._timed.wrap("schedule", core.scheduler, "schedule")
        self._timed.wrap("moves", core, "_begin_moves", "take_moved", "give_up")
        if mover is not None:
            self._timed.wrap("moves", mover, "ask")
        self._timed.wrap("pack", core._packer, "pack")
        self._timed.wrap("complete", core, "complete")
        self._timed.wrap("send", self._sender, "send")

    def run(self, num_steps: int) -> None:
        """So many steps."""
        for _ in range(num_steps):
            self._num_ended = 0
            self._step()
            self._sender.drop(self._sender.send())
            self.steps.append(self._timed.take())
            for _ in range(self._num_ended if self._arrivals else 0):
                self._submit_row()
        assert self._engine.stats().num_requests_waiting == bool(self._waiting) or self._arrivals

    def figures(self) -> dict[str, Figures]:
        """The figures of each part of the steps, and of their sum (`parts`)."""
        micros = {part: np.array([step[part] for step in self.steps]) * 1e6 for part in PARTS}
        micros["parts"] = sum(micros.values(), np.zeros(len(self.steps)))
        return {
            part: Figures(float(np.median(us)), float(us.mean()), float(np.percentile(us, 99)))
            for part, us in micros.items()
        }

    def counts(self) -> OffloadingCounts:
        """The counts of pages that have moved."""
        return self._engine.stats().offloading

    def close(self) -> None:
        self._engine.shutdown()
        self._sender.close()

    def _fill(self, num_rows: int) -> None:
        """All rows run, and a cached prompt waits, if one is to."""
        cached = self._prompt(self._waiting)
        if cached:
            self._submit(cached, 1)
            while self._step():
                pass
        for _ in range(num_rows):
            self._submit_row()
        while (stats := self._engine.stats()).num_requests_running < num_rows or stats.num_requests_waiting:
            self._step()
        if cached:
            self._submit(cached, 1)
        for _ in range(WARM_UP_STEPS):
            self._step()
        self._sender.drop(self._sender.send())

    def _step(self) -> bool:
        self._now_s += STEP_S
        return self._engine.step()

    def _prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.integers(10, 32000, length).tolist())

    def _submit_row(self) -> None:
        most = int(self._random.integers(100, self._max_tokens)) if self._arrivals else self._max_tokens
        self._submit(self._prompts[self._num_submitted % len(self._prompts)], most)

    def _submit(self, prompt: tuple[int, ...], most: int) -> None:
        self._num_submitted += 1
        sampling = SamplingParams(max_tokens=most, temperature=0, ignore_eos=bool(self._waiting))
        request = Request(request_id=str(self._num_submitted), prompt=prompt, sampling=sampling)
        self._engine.add_request(request, self._on_output)

    def _on_output(self, output: RequestOutput) -> None:
        self._num_ended += output.finish_reason is not None
        self._sender.items.append(output)


class _InstantStore:
    """A `PageStore` that takes no time, and has nothing."""

    num_broken = num_failed = num_pages = bytes_on_disk = 0

    def has(self, digest: bytes) -> bool:
        return False

    def load(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        return False

    def store(self, digest: bytes, tokens: bytes, page: np.ndarray) -> bool:
        return True

    def clear(self) -> None: ...

    def close(self) -> None: ...


def measure(
    num_rows: int,
    num_steps: int,
    tiers: Sequence[Tier] = (Tier.OFF,),
    targets: Sequence[Targets | None] = (None,),
    *,
    arrivals: bool = False,
    context: int = 200,
    waiting: int = 0,
) -> dict[tuple[Tier, Targets | None], Bench]:
    """A bench for each of the tiers with each of the targets, which have taken turns."""
    benches = {
        kind: Bench(num_rows, num_steps, *kind, arrivals=arrivals, context=context, waiting=waiting)
        for kind in product(tiers, targets)
    }
    for start in range(0, num_steps, TURN):
        for bench in benches.values():
            bench.run(min(TURN, num_steps - start))
    for bench in benches.values():
        bench.close()
    return benches


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", action=EachCounts, default=[64, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--arrivals", action="store_true", help="replace finished requests by new ones")
    parser.add_argument("--context", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--waiting", type=int, default=0, help="tokens of a cached prompt that waits")
    parser.add_argument("--tiers", type=Tier, choices=TIERS, nargs="+", action=EachCounts, default=[Tier.OFF],
                        help="what is behind the device's pages")  # fmt: skip
    parser.add_argument("--targets", action="store_true", help="also with latency targets")
    args = parser.parse_args(argv)
    say_head()
    say("Microseconds of CPU per step: median (mean, p99).\n")
    table = Table(
        {"rows": "5", "tier": "6", "targets": "7", **dict.fromkeys((*PARTS, "parts"), ">16"), "saved, loaded": ">14"},
        say,
    )
    for rows in args.rows:
        targets = (None, TARGETS) if args.targets else (None,)
        benches = measure(
            rows, args.steps, args.tiers, targets, arrivals=args.arrivals, context=args.context, waiting=args.waiting
        )
        for (tier, told), bench in benches.items():
            moved = bench.counts()
            figures = map(str, bench.figures().values())
            told_as = "-" if told is None else f"{told.itl_ms:g}/{told.ttft_ms:g}"
            table.row(rows, tier, told_as, *figures, f"{moved.num_saved}, {moved.num_loaded}")
    return 0
