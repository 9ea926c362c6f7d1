"""A runner whose memory on the device is lent to others, such as a trainer, and comes back in parts."""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import TYPE_CHECKING

from model.inputs.words import one_line

if TYPE_CHECKING:
    from model.execution.host_copy import HostCopy
    from model.execution.runner import ModelRunner

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)  # vLLM's names of the parts


class RunnerSleep:
    """What of a runner is on the device. No step is in flight during any of the calls, and none may run while a part is
    `missing`.

    An error of a call means that nothing has changed.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.missing: frozenset[str] = frozenset()  # some of TAGS
        self._runner = runner
        self._held: dict[int, HostCopy] = {}  # of the runner's weights, by their places in them

    def sleep(self, level: int) -> None:
        """Frees the memory of all parts.

        Args:
            level: 1 keeps the weights in the host's memory. 2 drops them, except those that draft.

        Raises:
            ValueError: the host's memory has no room for the weights.
        """
        from model.execution.host_copy import HostCopy

        if WEIGHTS not in self.missing:
            kept = [place for place in range(len(self._runner.weights)) if level == 1 or place not in self._given]
            try:
                self._held = {place: HostCopy.of(self._runner.weights[place]) for place in kept}
            except MemoryError as error:
                raise ValueError("the host's memory has no room for the weights") from error
        elif level == 2:
            self._held = self._of_drafts()
        self._runner.release()
        self.missing = frozenset(TAGS)

    def missing_after(self, tags: Collection[str]) -> frozenset[str]:
        """What is `missing` after `wake_up(tags)`. Weights that were dropped stay missing until others are given."""
        are_held = self._given <= self._held.keys()
        return self.missing - {tag for tag in tags if tag != WEIGHTS or are_held}

    def wake_up(self, tags: Collection[str]) -> None:
        """Brings parts back. Raises ValueError if the device has no room."""
        missing = self.missing_after(tags)
        comes = self.missing - missing
        try:
            if WEIGHTS in comes:
                self._runner.restore([self._held[place] for place in sorted(self._held)], with_state=KV_CACHE in comes)
            elif KV_CACHE in comes:
                self._runner.allocate()
        except RuntimeError as error:
            words = f"{' and '.join(sorted(comes))} cannot go back to the device: {one_line(str(error))}"
            raise ValueError(words) from error
        if WEIGHTS in comes:
            self._held = {}
        self.missing = missing

    def took_others(self) -> None:
        """The model has other weights, which are on the device. Those that draft come back."""
        for place, copy in self._of_drafts().items():
            self._runner.weights[place] = copy.on_devices()
        self._held, self.missing = {}, self.missing - {WEIGHTS}

    @property
    def _given(self) -> Set[int]:
        """The places of the model's weights, which `took_others` need not bring."""
        return set(self._runner.described.numbers.values())

    def _of_drafts(self) -> dict[int, HostCopy]:
        return {place: copy for place, copy in self._held.items() if place not in self._given}
