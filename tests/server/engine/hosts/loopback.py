"""Hosts of a cluster in one process, over real sockets on the loopback interface."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from queue import SimpleQueue

import numpy as np

from batcher.step import Bucket, Capacity, StepInput, Variant, WeightsKind
from server.engine.hosts.cluster import Cluster, HostsError
from server.engine.hosts.follower import Follower
from server.engine.hosts.leader import Leader

SECRET = "a secret for the tests"
SETTINGS = {"--dtype": "float32"}
BUCKETS = [Bucket(1, 1, Variant.GREEDY), Bucket(16, 2, Variant.SAMPLE)]


def free_port() -> int:
    """The first of three that are free. The system gives none of them to a program that asks for any port."""
    while True:
        first = random.randrange(10_000, 16_000, 4)
        with contextlib.suppress(OSError), contextlib.ExitStack() as sockets:
            for port in range(first, first + 3):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def say_nothing(line: str) -> None:
    pass


class Hosts:
    """The hosts of a cluster, all in this process."""

    def __init__(self, num_hosts: int = 2, timeout_s: float = 20.0) -> None:
        self.cluster = Cluster(
            coordinator="127.0.0.1",
            port=free_port(),
            num_hosts=num_hosts,
            host_id=0,
            timeout_s=timeout_s,
            secret=SECRET,
        )
        self.failures: dict[int, SimpleQueue[str]] = {number: SimpleQueue() for number in range(num_hosts)}
        self.open: list[Callable[[], None]] = []

    def leader(self) -> Leader:
        leader = Leader(self.cluster, self.failures[0].put)
        self.open.append(lambda: leader.fail("the test is over"))
        return leader

    def follower(self, number: int = 1, **changes: object) -> Follower:
        follower = Follower(replace(self.cluster, host_id=number, **changes), self.failures[number].put)
        self.open.insert(0, follower.close)
        return follower

    def together(self) -> tuple[Leader, Follower]:
        """A leader and its only follower, which have met."""
        leader, follower = self.leader(), self.follower()
        with arriving(follower):
            leader.gather(SETTINGS, say_nothing)
        return leader, follower


@contextlib.contextmanager
def arriving(follower: Follower, settings: dict[str, str] | None = None) -> Iterator[list[BaseException]]:
    errors: list[BaseException] = []

    def arrive() -> None:
        try:
            follower.arrive(SETTINGS if settings is None else settings, say_nothing)
        except HostsError as error:
            errors.append(error)

    thread = threading.Thread(target=arrive)
    thread.start()
    yield errors
    thread.join(30)
    assert not thread.is_alive()


class Result:
    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def result(self) -> str:
        if self._error is not None:
            raise self._error
        return "done"


class RecordingRunner:
    """Remembers what it was told to do. Steps whose first number is in `failing` fail. It can stage the adapters in
    `stageable`."""

    def __init__(
        self, num_pages: int = 10, failing: tuple[int, ...] = (), stageable: Container[int] = range(2**63)
    ) -> None:
        self.staged: set[int] = set()
        self._stageable = stageable
        self.calls: SimpleQueue[object] = SimpleQueue()
        self.num_compiles = 0
        self._failing = failing
        self._capacity = Capacity(
            num_slots=2, num_pages=num_pages, page_size=16, max_model_len=64, max_num_batched_tokens=16, vocab_size=8
        )

    def capacity(self) -> Capacity:
        return self._capacity

    def warm_up(self, buckets, report) -> None:
        raise AssertionError("the halves of the warm-up are called")

    def compile(self, buckets, report) -> None:
        self.calls.put(list(buckets))

    def run_each(self, execute, report) -> None:
        for number in range(2):
            execute(step(number)).result()

    def execute(self, step: StepInput) -> Result:
        number = int(step.packed[0])
        self.calls.put(number)
        return Result(RuntimeError(f"step {number} has failed") if number in self._failing else None)

    def stage(self, kind: WeightsKind, adapter: int) -> None:
        if adapter not in self._stageable:
            raise ValueError(f"the folder of adapter {adapter} has changed")
        self.staged.add(adapter)

    def drop(self, kind: WeightsKind, adapter: int) -> None:
        self.staged.discard(adapter)

    def recover(self) -> None:
        self.calls.put("recover")

    def seen(self, count: int) -> list[object]:
        return [self.calls.get(timeout=30) for _ in range(count)]


def step(number: int) -> StepInput:
    return StepInput(bucket=BUCKETS[0], packed=np.full(4, number, np.int32))


class Exits:
    """What a `Reporter` would do to the process."""

    def __init__(self) -> None:
        self.ends: SimpleQueue[str] = SimpleQueue()

    def fail(self, message: str) -> None:
        self.ends.put(message)

    def end(self) -> None:
        self.ends.put("ended")
