"""The leader's runner: every call that changes a device goes to the followers, too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from batcher.step import Bucket, Capacity, Runner, StepHandle, StepInput
from server.engine.hosts import messages
from server.engine.hosts.leader import Leader


class HostRunner(Runner, Protocol):
    """A runner whose warm-up has two halves: programs are compiled by each host, and run by the leader's word."""

    def compile(self, buckets: Iterable[Bucket], report: Callable[[str], None]) -> None:
        """Compiles every bucket's program, and runs none."""

    def run_each(self, execute: Callable[[StepInput], StepHandle], report: Callable[[str], None]) -> None:
        """Runs the programs once, by `execute`. On a CPU only those that fit in a time, which differs between hosts."""


class BroadcastRunner:
    """`batcher.step.Runner` over all hosts of a cluster. The engine above it does not know that there are several.

    A step is sent before it is dispatched here. So the followers dispatch it meanwhile, in the same order.
    """

    def __init__(self, runner: HostRunner, leader: Leader) -> None:
        self._runner = runner
        self._leader = leader

    def capacity(self) -> Capacity:
        return self._runner.capacity()

    def warm_up(
        self, buckets: Iterable[Bucket], report: Callable[[str], None], may_wait: Collection[Bucket] = ()
    ) -> list[Bucket]:
        """Compiles on all hosts; then all run the same programs once.

        It leaves none for later: the leader could use a program only once every host has said that it has it.
        """
        buckets = list(buckets)
        self._leader.send(messages.Compile([messages.bucket_to_wire(bucket) for bucket in buckets]))
        self._runner.compile(buckets, report)
        self._leader.wait_until_compiled()
        self._runner.run_each(self.execute, report)
        return []

    def compile_later(self, bucket: Bucket, report: Callable[[str], None]) -> None:
        raise RuntimeError("several hosts compile all programs before they serve")

    def execute(self, step: StepInput) -> StepHandle:
        self._leader.send(messages.step_to_wire(step))
        return self._runner.execute(step)

    def recover(self) -> None:
        self._leader.send(messages.Recover())
        self._runner.recover()

    @property
    def num_compiles(self) -> int:
        return self._runner.num_compiles
