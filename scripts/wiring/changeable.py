"""An engine whose weights can be changed while it serves: to the host and back, or for others of the same shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from batcher.change import Change
from batcher.engine import Engine
from model.inputs.paths import is_url, place
from scripts.wiring.settings import EngineSettings
from scripts.wiring.weights import ChosenWeights, choose_weights
from server.engine.around import EngineAround
from server.engine.wire import ChangeWeights, WeightsChange

if TYPE_CHECKING:
    from model.execution.runner import ModelRunner


class ChangeableEngine(EngineAround):
    """`server.engine.process.ChangeableEngine`.

    Args:
        load: loads weights into the runner in place of its own, see `wiring.load`.
        weights: those of the start.
    """

    def __init__(
        self,
        engine: Engine,
        runner: ModelRunner,
        load: Callable[[ChosenWeights], None],
        settings: EngineSettings,
        weights: ChosenWeights,
        platform: str,
    ) -> None:
        super().__init__(engine)
        self._engine = engine
        self._runner = runner
        self._load = load
        self._settings = settings
        self._weights = weights
        self._platform = platform

    def change_weights(self, command: ChangeWeights, on_done: Callable[[Exception | None], None]) -> None:
        """Changes the weights between two steps. Running requests are recomputed, and the prefix cache is emptied."""
        match command.change:
            case WeightsChange.SLEEP:
                change = Change(work=self._runner.release, on_done=on_done, serves_after=False)
            case WeightsChange.WAKE_UP:
                change = Change(work=self._runner.restore, on_done=on_done)
            case WeightsChange.RELOAD:
                change = Change(work=lambda: self._reload(command.model), on_done=on_done)
        self._engine.change(change)

    def _reload(self, model: str | None) -> None:
        """Raises ValueError or OSError if the weights cannot be used; the old ones are then in place."""
        weights = self._find(model)
        self._runner.release()  # there may be no room for both
        try:
            self._load(weights)
        except BaseException:
            self._runner.restore()
            raise

    def _find(self, model: str | None) -> ChosenWeights:
        """The weights in a folder or file. Raises ValueError if the engine was not made for them."""
        settings = self._settings
        if model is not None:
            settings = dataclasses.replace(settings, model=model)
            if not place(model, "model").exists():
                where = "in the bucket" if is_url(model) else "on this machine"
                raise ValueError(f"model {model!r}: there is no such folder or file {where}")
        weights = choose_weights(settings, self._platform)
        for name in ("config", "dtype", "quantization"):
            if getattr(weights, name) != getattr(self._weights, name):
                differing = _differing(getattr(self._weights, name), getattr(weights, name))
                raise ValueError(f"model {settings.model!r}: it is not a model of the same shapes: {name} {differing}")
        if weights.source.eos_token_ids != self._weights.source.eos_token_ids:
            raise ValueError(f"model {settings.model!r}: it ends its answers with other tokens")
        return weights


def _differing(old: object, new: object) -> str:
    """The values that differ, in words."""
    if not dataclasses.is_dataclass(old) or not dataclasses.is_dataclass(new):
        return f"is {new} and was {old}"
    names = [field.name for field in dataclasses.fields(old) if getattr(old, field.name) != getattr(new, field.name)]
    return ", ".join(f"{name} is {getattr(new, name)} and was {getattr(old, name)}" for name in names)
