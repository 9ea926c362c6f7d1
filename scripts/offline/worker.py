"""The worker of an `LLM`, as trainers of vLLM know it, with the methods of their own class (`worker_extension_cls`)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.building.runner import Built

NAME = "worker_extension_cls"


class Worker:
    """The only worker: one process drives all chips. Its attributes have vLLM's names.

    Args:
        load_weights: `EngineForTraining.load_weights`.
        update_weights: `EngineForTraining.update_weights`.
        built: what the engine was made of.
    """

    load_weights: Callable[..., None]
    update_weights: Callable[..., None]
    model_runner: SimpleNamespace
    rank = local_rank = 0

    def __init__(self, load_weights: Callable[..., None], update_weights: Callable[..., None], built: Built) -> None:
        self.load_weights, self.update_weights = load_weights, update_weights
        self.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=load_weights))
        self._built = built

    @property
    def device(self) -> Any:
        """The first chip, as torch names it. On a TPU it is the host's processor."""
        import jax

        chip, torch = jax.devices()[0], importlib.import_module("torch")
        return torch.device("cuda", chip.local_hardware_id) if chip.platform == "gpu" else torch.device("cpu")

    @property
    def model_config(self) -> SimpleNamespace:
        """The type of the computation, as torch's `dtype`."""
        return SimpleNamespace(dtype=getattr(importlib.import_module("torch"), self._built.plan.weights.dtype))


def num_chips(built: Built) -> int:
    """The number of chips that share the model."""
    return int(built.info.cache_config.get("tensor_parallel_size", "1"))


def worker_class(extension: str | type | None) -> type[Worker]:
    """The class of a worker with the methods of `extension`, which may be the name "package.module.Class". Raises
    ValueError if there is no such class, or if a name of it is the worker's own."""
    if extension is None:
        return Worker
    found: Any = extension
    if isinstance(extension, str):
        module, _, name = extension.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{NAME}: {extension!r} cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"{NAME}: a class or its name, not {extension!r}")
    own = {*dir(Worker), *Worker.__annotations__}
    taken = [name for name in dir(found) if not name.startswith("__") and name in own]
    if taken:
        raise ValueError(f"{NAME}: the worker has a {taken[0]} of its own: rename that of {found.__qualname__}")
    return type(found.__name__, (Worker, found), {})


def check_alone(worker: type[Worker], chips: int) -> None:
    """Prepares for the methods of an extension, which may join a trainer's group of processes. Raises ValueError if
    they would wait there for a process of each chip.

    They expect torch's default group of processes. It begins here, with this process alone, if torch is installed.
    """
    if worker is Worker:
        return
    if chips > 1:
        raise ValueError(
            f"{NAME}: its methods expect a process for each chip, and one process drives all {chips}: give "
            "tensor_parallel_size=1, or leave it out and give all arrays to update_weights"
        )
    if importlib.util.find_spec("torch") is None:
        return
    distributed = importlib.import_module("torch.distributed")
    if distributed.is_available() and not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
