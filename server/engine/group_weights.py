"""Other weights for several engines behind one server: all of them change, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from server.engine.client import ProcessEngineClient, WeightsError
from server.engine.wire import WeightsChange

_UNDONE_BY = {
    WeightsChange.SLEEP: WeightsChange.WAKE_UP,
    WeightsChange.WAKE_UP: WeightsChange.SLEEP,
    WeightsChange.RELOAD: WeightsChange.RELOAD,
}


class GroupWeights:
    """The weights of the engines of a group.

    Args:
        on_split: is called with the reason if engines are left with different weights. They must not go on then: an
            answer would depend on the engine that gives it.
    """

    def __init__(self, engines: Sequence[ProcessEngineClient], on_split: Callable[[str], None]) -> None:
        self._engines = engines
        self._on_split = on_split
        self._changes = asyncio.Lock()
        self._model: str | None = None  # whose weights all engines have; None: those of the start

    @property
    def are_sleeping(self) -> bool:
        """Whether the engines sleep; all or none does."""
        return all(engine.is_sleeping for engine in self._engines)

    async def change(self, change: WeightsChange, model: str | None = None) -> None:
        """As `ProcessEngineClient.change_weights`, of all engines at once. If one cannot change, those that have
        changed go back, and the WeightsError names it."""
        await asyncio.shield(self._change(change, model))  # to its end, also without a caller

    async def _change(self, change: WeightsChange, model: str | None) -> None:
        async with self._changes:
            errors = await self._ask(range(len(self._engines)), change, model)
            if not errors:
                if change is WeightsChange.RELOAD:
                    self._model = model
                return
            changed = [number for number in range(len(self._engines)) if number not in errors]
            stuck = await self._ask(changed, _UNDONE_BY[change], self._model)
            if stuck:
                self._on_split(f"the engines have different weights: {_listed(stuck)}")
            raise WeightsError(_listed(errors))

    async def _ask(self, numbers: Sequence[int], change: WeightsChange, model: str | None) -> dict[int, WeightsError]:
        """The errors of the engines that could not change, by their numbers."""
        asked = (self._engines[number].change_weights(change, model) for number in numbers)
        results = await asyncio.gather(*asked, return_exceptions=True)
        errors: dict[int, WeightsError] = {}
        for number, result in zip(numbers, results, strict=True):
            if isinstance(result, WeightsError):
                errors[number] = result
            elif result is not None:
                raise result
        return errors


def _listed(errors: dict[int, WeightsError]) -> str:
    return "; ".join(f"engine {number}: {error}" for number, error in errors.items())
