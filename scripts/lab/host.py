"""What the host costs per step: scheduling, packing, taking results in and sending them, without a device.

    python -m scripts.lab host [--rows 64 256 1024] [--steps 2000] [--arrivals] [--context 200]

A runner that answers at once replaces the model, so only the host's work is measured. Prints microseconds of CPU time
per step: of each part, and of the parts together, the median, the mean and the 99th percentile. `send` is what the
sender's thread does: the message to the HTTP process is made, encoded and given to ZeroMQ. `--arrivals` replaces every
finished request by a new one, which adds admissions and prompt chunks; without it the rows only decode. `--waiting`
adds a request whose prompt, of so many tokens, is fully cached, and which waits for room for its output.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.request import Request, RequestOutput, SamplingParams
from batcher.step import Capacity
from scripts.flags.parsing import EachCounts
from scripts.lab.simulation.instant_runner import InstantRunner
from scripts.lab.tables import Table, say, say_head
from server.engine import outbox

PAGE_SIZE = 16
BUDGET = 2048
WARM_UP_STEPS = 100
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

    def wrap(self, owner: Any, name: str) -> None:
        """Times the method from now on."""
        method = getattr(owner, name)

        def timed(*args: object) -> object:
            start = time.thread_time()
            result = method(*args)
            self.now[name] += time.thread_time() - start
            return result

        setattr(owner, name, timed)

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


PARTS = ("schedule", "pack", "complete", "send")


def measure(
    num_rows: int, num_steps: int, *, arrivals: bool = False, context: int = 200, waiting: int = 0
) -> dict[str, Figures]:
    """Of each part of a step, and of their sum (`parts`)."""
    rng = np.random.default_rng(0)
    max_tokens = 200 if arrivals else num_steps + 1000
    max_model_len = max(context, waiting) + 100 + max_tokens
    row_pages = num_rows * -(-(context + max_tokens) // PAGE_SIZE)
    capacity = Capacity(
        num_slots=num_rows + 1,
        num_pages=max(row_pages + waiting // PAGE_SIZE // 2, -(-max_model_len // PAGE_SIZE)),
        page_size=PAGE_SIZE,
        max_model_len=max_model_len,
        max_num_batched_tokens=BUDGET,
        vocab_size=32000,
    )
    ladder = BucketLadder(BucketConfig(max_num_batched_tokens=BUDGET, max_num_seqs=num_rows + 1))
    engine = Engine(InstantRunner(capacity), EngineConfig(eos_token_ids=(1, 2, 3), seed=0), ladder)
    engine.warm_up(lambda _line: None)
    sender = Sender()
    engine.listen(lambda tokens: sender.items.append(tokens))
    num_submitted = num_ended = 0

    def on_output(output: RequestOutput) -> None:
        nonlocal num_ended
        num_ended += output.finish_reason is not None
        sender.items.append(output)

    def submit(prompt: tuple[int, ...], most: int) -> None:
        nonlocal num_submitted
        num_submitted += 1
        sampling = SamplingParams(max_tokens=most, temperature=0, ignore_eos=bool(waiting))
        engine.add_request(Request(request_id=str(num_submitted), prompt=prompt, sampling=sampling), on_output)

    def submit_row() -> None:
        most = int(rng.integers(100, max_tokens)) if arrivals else max_tokens
        submit(tuple(rng.integers(10, 32000, context).tolist()), most)

    if waiting:
        cached = tuple(rng.integers(10, 32000, waiting).tolist())
        submit(cached, 1)
        while engine.step():
            pass
    for _ in range(num_rows):
        submit_row()
    while engine.stats().num_requests_running < num_rows or engine.stats().num_requests_waiting:
        engine.step()
    if waiting:
        submit(cached, 1)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    sender.drop(sender.send())
    timed, core = Timed(), engine.core
    timed.wrap(core.scheduler, "schedule")
    timed.wrap(core._packer, "pack")
    timed.wrap(core, "complete")
    timed.wrap(sender, "send")
    steps: list[dict[str, float]] = []
    for _ in range(num_steps):
        num_ended = 0
        engine.step()
        sender.drop(sender.send())
        steps.append(timed.take())
        for _ in range(num_ended if arrivals else 0):
            submit_row()
    assert engine.stats().num_requests_waiting == bool(waiting) or arrivals
    sender.close()
    micros = {part: np.array([step[part] for step in steps]) * 1e6 for part in PARTS}
    micros["parts"] = sum(micros.values(), np.zeros(num_steps))
    return {
        part: Figures(float(np.median(us)), float(us.mean()), float(np.percentile(us, 99)))
        for part, us in micros.items()
    }


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", action=EachCounts, default=[64, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--arrivals", action="store_true", help="replace finished requests by new ones")
    parser.add_argument("--context", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--waiting", type=int, default=0, help="tokens of a cached prompt that waits")
    args = parser.parse_args(argv)
    say_head()
    say("Microseconds of CPU per step: median (mean, p99).\n")
    table = Table({"rows": "5", **dict.fromkeys((*PARTS, "parts"), ">16")}, say)
    for rows in args.rows:
        figures = measure(rows, args.steps, arrivals=args.arrivals, context=args.context, waiting=args.waiting)
        table.row(rows, *map(str, figures.values()))
    return 0
