"""Moves the parts of a runner off the device and back, so that others can use the device's memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import TYPE_CHECKING

from server.engine.wire import KV_CACHE, PARTS, WEIGHTS

if TYPE_CHECKING:
    from model.execution.host_copy import HostCopy
    from model.execution.runner import ModelRunner

Copies = Mapping[int, "HostCopy"]  # copies of the runner's weights, by their indices in `ModelRunner.weights`


class RunnerSleep:
    """Moves the parts of a runner off the device and back. No step may be in flight during a call, and none may run
    while a part is `missing`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.missing: frozenset[str] = frozenset()  # some of PARTS
        self._runner = runner
        self._held: Copies = {}

    @property
    def has_dropped(self) -> bool:
        """Whether the model's weights were dropped, so that others must be given."""
        return WEIGHTS in self.missing and not self._given <= self._held.keys()

    def copies(self, level: int) -> Copies:
        """Copies weights to the host's memory: all of them at level 1, and at level 2 only those of the draft model.

        Raises ValueError if the host's memory has no room.
        """
        from model.execution.host_copy import HostCopy

        if WEIGHTS in self.missing:
            return self._held if level == 1 else self._of_drafts()
        kept = [place for place in range(len(self._runner.weights)) if level == 1 or place not in self._given]
        try:
            return {place: HostCopy.of(self._runner.weights[place]) for place in kept}
        except MemoryError as error:
            raise ValueError("the host's memory has no room for the weights") from error

    def sleep(self, copies: Copies) -> None:
        """Frees the device's memory of all parts. Keeps `copies` for `bring`."""
        self._runner.release()
        self._held, self.missing = copies, frozenset(PARTS)

    def bring(self, parts: Collection[str]) -> None:
        """Brings parts back. Weights that were dropped stay missing. The copies are kept until `settle`.

        Raises RuntimeError if the device has no room; nothing has changed then.
        """
        comes = self.missing & set(parts)
        if self.has_dropped:
            comes -= {WEIGHTS}
        if WEIGHTS in comes:
            self._runner.restore([self._held[place] for place in sorted(self._held)], with_state=KV_CACHE in comes)
        elif KV_CACHE in comes:
            self._runner.allocate()
        self.missing -= comes

    def take_away(self, parts: Set[str]) -> None:
        """Undoes a `bring` of these parts."""
        self._runner.release(weights=WEIGHTS in parts, state=KV_CACHE in parts)
        self.missing |= parts

    def settle(self) -> None:
        """Frees the copies, if the weights are on the device."""
        if WEIGHTS not in self.missing:
            self._held = {}

    def took_others(self) -> None:
        """Notes that the model has other weights, which are on the device. Brings the draft model's weights back."""
        for place, copy in self._of_drafts().items():
            self._runner.weights[place] = copy.on_devices()
        self._held, self.missing = {}, self.missing - {WEIGHTS}

    def took_all(self, *, with_state: bool) -> None:
        """Notes that all weights, and with `with_state` also the state, are new and on the device."""
        self._held, self.missing = {}, frozenset() if with_state else self.missing - {WEIGHTS}

    @property
    def _given(self) -> Set[int]:
        """The indices of the model's weights, which `took_others` need not bring back."""
        return set(self._runner.described.numbers.values())

    def _of_drafts(self) -> Copies:
        return {place: copy for place, copy in self._held.items() if place not in self._given}
