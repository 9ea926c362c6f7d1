"""How an engine, or a group of engines, changes its weights and its LoRA adapters: in two phases (`wire.Phase`)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Set
from functools import wraps
from typing import Any

from server.engine.wire import (
    AnyQuestion,
    Change,
    ChangePhase,
    ChangeWeights,
    EngineQuestion,
    LoadAdapter,
    Phase,
    Reply,
    UnloadAdapter,
    UpdateWeights,
    WeightsChange,
)


def to_its_end[**P, R](work: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """A decorator that completes a coroutine even if its caller is cancelled, because the engine completes a change
    that it has begun."""

    @wraps(work)
    async def shielded(*args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.shield(work(*args, **kwargs))

    return shielded


class TwoPhaseEngine(ABC):
    """Makes whole changes of two phases. They run one after the other. Changes of the weights and of adapters do not
    wait for each other."""

    def __init__(self) -> None:
        self._weight_changes = asyncio.Lock()  # and of the steps of updates
        self._adapter_changes = asyncio.Lock()

    @property
    @abstractmethod
    def missing(self) -> Set[str]:
        """The names in `wire.PARTS` of the parts that are not on the devices. The engine sleeps while there are any."""

    @to_its_end
    async def ask(self, question: AnyQuestion) -> Reply:
        """Asks the engine for a whole change, or one question. A change whose PREPARE has failed is over."""
        match question:
            case ChangeWeights():
                async with self._weight_changes:
                    if question.change is WeightsChange.WAKE_UP and not self.missing:
                        return Reply()
                    return await self._change(question)
            case LoadAdapter() | UnloadAdapter():
                async with self._adapter_changes:
                    return await self._change(question)
            case UpdateWeights():
                async with self._weight_changes:
                    return await self._ask(question)
        return await self._ask(question)

    @abstractmethod
    async def _ask(self, question: EngineQuestion) -> Reply:
        """Asks one question."""

    async def _change(self, change: Change) -> Reply:
        prepared = await self._ask(ChangePhase(Phase.PREPARE, change))
        if prepared.error is not None:
            return prepared
        committed = await self._ask(ChangePhase(Phase.COMMIT, change))
        return prepared if committed.error is None else committed
