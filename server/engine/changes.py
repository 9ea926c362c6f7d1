"""Asks an engine, or a group of engines, to change its weights or its LoRA adapters."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from server.engine.wire import Adapter, AdapterChange, Change, ChangeWeights, Phase, WeightsChange


def to_its_end[**P, R](work: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """A decorator that completes a coroutine even if its caller is cancelled, because the engine completes a change
    that it has begun."""

    @wraps(work)
    async def shielded(*args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.shield(work(*args, **kwargs))

    return shielded


class Changeable(ABC):
    """Makes changes in two phases, one after the other. Those of the weights and those of adapters do not wait for each
    other."""

    def __init__(self) -> None:
        self._weight_changes = asyncio.Lock()  # and of the steps of updates
        self._adapter_changes = asyncio.Lock()

    @property
    @abstractmethod
    def is_sleeping(self) -> bool:
        """Whether a part of the weights or the K/V is not on the device."""

    @abstractmethod
    async def do(self, phase: Phase, change: Change) -> Adapter | None:
        """Does one phase of a change. Returns the adapter that it concerns.

        Raises WeightsError or AdapterError if nothing has changed. A change whose PREPARE has failed is over.
        """

    @to_its_end
    async def change_weights(self, change: ChangeWeights) -> None:
        """Changes the weights between two steps. Requests wait while a part is missing.

        Raises WeightsError if they cannot be changed.
        """
        async with self._weight_changes:
            if change.change is not WeightsChange.WAKE_UP or self.is_sleeping:
                await self._change(change)

    @to_its_end
    async def change_adapters(self, change: AdapterChange) -> Adapter | None:
        """Loads or unloads a LoRA adapter. `adapters` has the change on return.

        Raises AdapterError if the change cannot be made.
        """
        async with self._adapter_changes:
            return await self._change(change)

    async def _change(self, change: Change) -> Adapter | None:
        found = await self.do(Phase.PREPARE, change)
        await self.do(Phase.COMMIT, change)
        return found
