"""Models of several shapes or forms in one process: an engine for each shape. All engines share the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from batcher.engine import Engine
from batcher.engines import AnyEngine, Engines
from model.compiling.compile_cache import expecting_compiles
from scripts.building.adapter_store import loaded_adapters
from scripts.building.device import Report
from scripts.building.engine_plans import Needs, plan_beside, share_memory
from scripts.building.limits import LEAST_MODELS, EnginePlan
from scripts.building.models import RunnersModels, choose_model, folder_of, identity_of
from scripts.building.runner import Built, build_runner, warm_engine
from scripts.building.weights import unlike
from server.engine.adapters import Adapters
from server.engine.kv_events import KvEventPublisher
from server.engine.wire import LoadedModel
from server.text.tokenizer import ByteLevelTokenizer


@dataclass(frozen=True, eq=False)
class _Shape:
    built: Built
    engine: Engine
    own: int  # the identity of its model 0; 0: it is --model

    @property
    def models(self) -> RunnersModels:
        assert self.built.models is not None, "its settings have models"
        return self.built.models

    @property
    def taken(self) -> int:
        """The bytes of the device's memory that it may take."""
        capacity, needs = self.built.runner.capacity(), Needs.of(self.built.plan)
        return needs.besides_kv(capacity.max_models) + (capacity.num_pages + 1) * needs.page


class Shapes:
    """The `server.engine.adapters.ModelStore` of this process, and its engines.

    Args:
        built: --model's.
        plans: those of the engines for other shapes at the start.
    """

    def __init__(self, built: Built, engine: Engine, plans: Iterable[EnginePlan], report: Report) -> None:
        self.engines = Engines(engine)
        self._first = _Shape(built, engine, 0)
        self._all = [self._first]
        self._of: dict[int, _Shape] = {}  # by identity of a model
        for plan in plans:
            self._add(plan, report)

    def load(self, path: str) -> int:
        """Finds the model at `path`, and builds an engine for it if it has another shape than all others.

        Raises ValueError or OSError if it cannot be used, and AdapterError with status 404 if there is none.
        """
        first = self._first.built.plan
        weights = choose_model(first, path)
        shape = next((shape for shape in self._all if not unlike(weights, shape.built.plan.weights)), None)
        if shape is None:
            if first.device.platform != "cpu":  # the plan has left no memory, and compilers time kernels
                difference = unlike(weights, first.weights)
                raise ValueError(f"{path} has another shape ({difference}): on a chip, name it at the start (--models)")
            plan = plan_beside(first, path, weights)
            share_memory([Needs.of(plan, [path])], lambda line: None, taken=sum(each.taken for each in self._all))
            shape = self._add(plan, lambda line: None)
        if identity_of(weights) != shape.own and shape.built.runner.capacity().max_models < LEAST_MODELS:
            raise ValueError(f"{path}: the device has no place for another model of its shape: --max-resident-models 2")
        identity = shape.models.add(weights)
        self._of[identity] = shape
        self.engines.place(identity, shape.engine)
        self.engines.add_model(identity, *shape.models.ends(identity))
        return identity

    def forget(self, identity: int) -> None:
        shape = self._of.pop(identity)
        self.engines.remove_model(identity)
        if not shape.models.forget(identity) and shape is not self._first:
            self._all.remove(shape)
            self.engines.remove(shape.engine)
            shape.built.runner.release()

    def loaded(self, name: str, identity: int, path: str) -> LoadedModel:
        return self._of[identity].models.loaded(name, identity, path)

    def _add(self, plan: EnginePlan, report: Report) -> _Shape:
        report(f"  model             {plan.settings.model}, by programs of its own")
        with expecting_compiles():
            built = build_runner(plan.settings, report, compile_meanwhile=True, plan=plan)
            folder = folder_of(plan.weights)
            tokenizer = None if folder is None else partial(ByteLevelTokenizer.from_folder, Path(folder))
            engine = warm_engine(built, report, tokenizer)
        shape = _Shape(built, engine, identity_of(plan.weights))
        self._all.append(shape)
        self.engines.add(engine, shape.own)
        return shape


def with_models(
    built: Built, engine: Engine, plans: Iterable[EnginePlan], publisher: KvEventPublisher | None, report: Report
) -> tuple[AnyEngine, Adapters | None]:
    """The engine with those of other shapes, and the adapters and models of the settings. The arguments are those of
    `Shapes` and of `loaded_adapters`."""
    shapes = None if built.models is None else Shapes(built, engine, plans, report)
    engines = engine if shapes is None else shapes.engines
    return engines, loaded_adapters(built.plan.settings, built.adapter_store, engines, publisher, shapes)
