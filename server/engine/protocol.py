"""The engine as the routes see it, and the receivers of its outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from functools import wraps
from typing import Any, Protocol

from batcher.request import FinishReason
from batcher.stats import EngineStats
from server.engine import wire


class EngineFailedError(RuntimeError):
    """The engine could not start, or has died.

    Args:
        is_refusal: whether the reason is a setting, a path or a checkpoint that cannot be used.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal

    def after(self, words: str) -> EngineFailedError:
        """The same failure, with words before its message."""
        return EngineFailedError(f"{words}: {self}", is_refusal=self.is_refusal)


class Receiver(Protocol):
    """Receives the outputs of one request. The first token comes in an output. The last output has a finish reason."""

    def on_output(self, output: wire.Output) -> None: ...

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        """Takes tokens after which the request goes on."""

    def on_weight_version(self, version: str) -> None:
        """Takes the version of the weights of all later tokens. Called once at first, and after each change."""


class Receivers(dict[str, Receiver]):
    """The receivers of open requests, by request id. Outputs of a request that was removed are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.id_of: dict[int, str] = {}  # number -> id of the requests that have their first output and not the last

    def take(self, outputs: wire.Outputs) -> None:
        for output in outputs.outputs:
            receiver = self.get(output.request_id)
            if output.finish_reason is None:
                self.id_of[output.number] = output.request_id
            else:
                self.id_of.pop(output.number, None)
                self.pop(output.request_id, None)
            if receiver is not None:
                receiver.on_output(output)
        if outputs.tokens is None:
            return
        for number, token_ids in outputs.tokens.rows():
            receiver = self.get(self.id_of[number])
            if receiver is not None:
                receiver.on_tokens(token_ids)

    def fail_all(self, error: str) -> None:
        receivers = self.copy()
        self.clear()
        for request_id, receiver in receivers.items():
            receiver.on_output(wire.failure(request_id, error, status=500))


def to_its_end[**P, R](work: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """A decorator that completes a coroutine even if its caller is cancelled, because the engine completes a change
    that it has begun."""

    @wraps(work)
    async def shielded(*args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.shield(work(*args, **kwargs))

    return shielded


class Engine(Protocol):
    """An engine in another process (`RemoteEngine`), several engines (`EngineGroup`), or the engine of an `LLM`.

    Changes of the weights run one after the other, and so do those of adapters and models. The two do not wait for each
    other.
    """

    info: wire.EngineInfo
    _weight_changes: asyncio.Lock  # and of the steps of updates
    _adapter_changes: asyncio.Lock

    def __init__(self) -> None:
        self._weight_changes, self._adapter_changes = asyncio.Lock(), asyncio.Lock()

    @property
    def stats(self) -> EngineStats: ...

    @property
    def adapters(self) -> Mapping[str, wire.Adapter]:
        """The LoRA adapters that are loaded, by name."""

    @property
    def models(self) -> Mapping[str, wire.LoadedModel]:
        """The models that were loaded besides the one that the engine started with, by name."""

    @property
    def num_adapter_loads(self) -> int:
        """The number of LoRA adapters that have been loaded so far."""

    @property
    def weight_version(self) -> str:
        """The name of the weights that serve. Receivers get each change of it, in order with the tokens."""

    @property
    def missing(self) -> Set[str]:
        """The names in `wire.PARTS` of the parts that are not on the devices. The engine sleeps while there are any."""

    @property
    def is_paused(self) -> bool: ...

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Receiver]]) -> None: ...

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends requests. Their receivers get no more outputs. Unknown and finished ids are ignored."""

    def reset_prefix_cache(self, *, reset_external: bool) -> None:
        """Empties the prefix cache. `reset_external` also empties the tiers outside the device."""

    @to_its_end
    async def ask(self, question: wire.AnyQuestion) -> wire.Reply:
        """Changes the weights, the adapters or the models, pauses, or resumes. Returns when it is done or refused. If
        the caller is cancelled, the change is completed nevertheless. A change whose PREPARE has failed is over."""
        match question:
            case wire.ChangeWeights():
                async with self._weight_changes:
                    if question.change is wire.WeightsChange.WAKE_UP and not self.missing:
                        return wire.Reply()
                    return await self._change(question)
            case wire.LoadAdapter() | wire.UnloadAdapter() | wire.LoadModel() | wire.UnloadModel():
                async with self._adapter_changes:
                    return await self._change(question)
            case wire.UpdateWeights():
                async with self._weight_changes:
                    return await self._ask(question)
        return await self._ask(question)

    async def _ask(self, question: wire.EngineQuestion) -> wire.Reply:
        """Asks one question."""
        ...

    async def _change(self, change: wire.Change) -> wire.Reply:
        prepared = await self._ask(wire.ChangePhase(wire.Phase.PREPARE, change))
        if prepared.error is not None:
            return prepared
        committed = await self._ask(wire.ChangePhase(wire.Phase.COMMIT, change))
        return prepared if committed.error is None else committed

    @property
    def death(self) -> str | None:
        """The reason why the engine is dead; None while it lives."""

    @property
    def last_heartbeat(self) -> float:
        """The time of the engine's last statistics, by the monotonic clock."""


def fault_of(engine: Engine, heartbeat_timeout_s: float) -> str | None:
    """The reason why the engine does not serve: it is dead, or has sent nothing for longer than this time. None: it
    serves."""
    if engine.death is not None:
        return f"The engine has failed: {engine.death}"
    silent_s = time.monotonic() - engine.last_heartbeat
    return None if silent_s <= heartbeat_timeout_s else f"The engine has not been heard of for {silent_s:.0f} s."
