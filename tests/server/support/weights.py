"""Weights of the fake runner, by number: the number is all that is in them, and its tokens depend on it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path

from batcher.step import Capacity
from server.engine.wire import PARTS, WEIGHTS, ChangeWeights, InFolder, WeightsChange, WeightsSource
from tests.batcher.fake_runner import Draw, FakeRunner


@dataclass(frozen=True, kw_only=True)
class FakeWeights:
    """Numbers that an engine cannot use."""

    none_begin: bool = False
    wrong: tuple[int, ...] = ()  # a check finds them
    unplaceable: tuple[int, ...] = ()  # only the commit does
    deadly: tuple[int, ...] = ()  # the commit loses the device


def missing_after(missing: Set[str], command: ChangeWeights) -> Set[str]:
    """The parts that are not on the device after the command, of those that were missing before it."""
    match command.change:
        case WeightsChange.SLEEP:
            return frozenset(PARTS)
        case WeightsChange.WAKE_UP:
            return missing - set(PARTS if command.parts is None else command.parts)
        case WeightsChange.RELOAD:
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


class Updates:
    """`server.engine.weight_changes.Updates`. The path of a folder is the number, or a file that has it: reading a FIFO
    lasts until the test writes."""

    def __init__(self, runner: WeightedRunner, faults: FakeWeights) -> None:
        self._runner = runner
        self._faults = faults
        self._number: int | None = None

    def begin(self) -> None:
        if self._faults.none_begin:
            raise ValueError("this one never begins")

    def receive(self, source: WeightsSource) -> None:
        assert isinstance(source, InFolder)
        self._number = None
        self._number = int(source.path if source.path.isdecimal() else Path(source.path).read_text())

    def check(self) -> None:
        if self._number is None:
            raise ValueError("nothing has been received")
        if self._number in self._faults.wrong:
            raise ValueError(f"{self._number} is not finite")

    def commit(self) -> None:
        assert self._number is not None, "the check has failed"
        number, self._number = self._number, None
        if number in self._faults.deadly:
            raise RuntimeError("the device is lost")
        if number in self._faults.unplaceable:
            raise ValueError(f"there is no room for {number}")
        self._runner.replace(number)

    def abandon(self) -> None:
        self._number = None
