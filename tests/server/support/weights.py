"""Weights of the fake runner, by number: the number is all that is in them, and its tokens depend on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

from batcher.step import Capacity
from server.engine.wire import PARTS, WEIGHTS, ChangeWeights, InSharedMemory, WeightsChange
from tests.batcher.fake_runner import Draw, FakeRunner

NONE = 99  # weights whose tokens no test expects


@dataclass(frozen=True, kw_only=True)
class FakeWeights:
    """Numbers that an engine cannot use."""

    wrong: tuple[int, ...] = ()  # a check finds them
    unplaceable: tuple[int, ...] = ()  # only the preparation does
    uncommittable: tuple[int, ...] = ()  # only the commit does
    deadly: tuple[int, ...] = ()  # the commit loses the device
    killing: tuple[int, ...] = ()  # the process is killed when they are to be committed


def missing_after(missing: Set[str], command: ChangeWeights) -> Set[str]:
    """The parts that are not on the device after the command, of those that were missing before it."""
    match command.change:
        case WeightsChange.SLEEP:
            return frozenset(PARTS)
        case WeightsChange.WAKE_UP:
            return missing - set(PARTS if command.parts is None else command.parts)
        case WeightsChange.RELOAD | WeightsChange.UPDATE:
            return missing - {WEIGHTS}


class WeightedRunner(FakeRunner):
    """A request's tokens are those that the weights' number would give as its adapter (`expected_tokens`)."""

    def __init__(self, capacity: Capacity, **options: object) -> None:
        super().__init__(capacity, **options)
        self.weights = 0

    def replace(self, weights: int) -> None:
        """K/V of the old weights are an error from now on."""
        self.weights = weights
        self._wipe()

    def _draw(self, slot: int) -> Draw:
        return replace(super()._draw(slot), adapter=self.weights)


class Weights:
    """`server.engine.weight_changes.Weights`. The path of a folder is the number. The name of a block of shared memory
    is that of a file, which has the number: reading a FIFO lasts until the test writes."""

    def __init__(self, runner: WeightedRunner, faults: FakeWeights) -> None:
        self.missing: Set[str] = frozenset()
        self._runner = runner
        self._faults = faults
        self._received: int | None = None
        self._change = ChangeWeights(WeightsChange.WAKE_UP)
        self._number = 0  # of the change

    def receive(self, source: InSharedMemory) -> None:
        self._received = int(Path(source.block).read_text())

    def forget(self) -> None:
        self._received = None

    def check(self, change: ChangeWeights) -> Mapping[str, str]:
        number = self._received if change.change is WeightsChange.UPDATE else int(change.model or 0)
        if number is None:
            raise ValueError("nothing has been received")
        if number in self._faults.wrong:
            raise ValueError(f"{number} is not finite")
        self._change, self._number = change, number
        return {}

    def prepare(self) -> None:
        """Where the old weights are, there is nothing meanwhile."""
        if self._number in self._faults.unplaceable:
            raise ValueError(f"there is no room for {self._number}")
        self._old = self._runner.weights
        self._runner.replace(NONE)

    def commit(self) -> None:
        self.abandon()
        if self._number in self._faults.killing:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._number in self._faults.deadly:
            raise RuntimeError("the device is lost")
        if self._number in self._faults.uncommittable:
            raise ValueError(f"there are no scales for {self._number}")
        if self._change.change in (WeightsChange.RELOAD, WeightsChange.UPDATE):
            self._runner.replace(self._number)
        self.missing = missing_after(self.missing, self._change)

    def abandon(self) -> None:
        self._runner.replace(self._old)
