"""A runner whose memory on the device is lent to others, such as a trainer, and comes back in parts."""

from __future__ import annotations

from collections.abc import Collection
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
        self._held: list[HostCopy] | None = None  # the weights, while the host keeps them

    def sleep(self, level: int) -> None:
        """Frees the memory of all parts.

        Args:
            level: 1 keeps the weights in the host's memory, and 2 drops them.

        Raises:
            ValueError: the host's memory has no room for the weights.
        """
        if level == 2:
            self._held = None
        elif WEIGHTS not in self.missing:
            try:
                self._held = self._runner.copied()
            except MemoryError as error:
                raise ValueError("the host's memory has no room for the weights") from error
        self._runner.release()
        self.missing = frozenset(TAGS)

    def missing_after(self, tags: Collection[str]) -> frozenset[str]:
        """What is `missing` after `wake_up(tags)`. Weights that were dropped stay missing until others are given."""
        return self.missing - {tag for tag in tags if tag != WEIGHTS or self._held is not None}

    def wake_up(self, tags: Collection[str]) -> None:
        """Brings parts back. Raises ValueError if the device has no room."""
        missing = self.missing_after(tags)
        comes = self.missing - missing
        try:
            if WEIGHTS in comes:
                assert self._held is not None
                self._runner.restore(self._held, with_state=KV_CACHE in comes)
            elif KV_CACHE in comes:
                self._runner.allocate()
        except RuntimeError as error:
            raise ValueError(
                f"{' and '.join(sorted(comes))} cannot go back to the device: {one_line(str(error))}"
            ) from error
        if WEIGHTS in comes:
            self._held = None
        self.missing = missing

    def took_others(self) -> None:
        """Other weights are on the device."""
        self._held, self.missing = None, self.missing - {WEIGHTS}
