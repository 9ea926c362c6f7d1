"""The LoRA adapters of an engine: their store, and those of the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from model.inputs.words import one_line
from scripts.flags.lora import FLAG
from scripts.flags.settings import EngineSettings
from server.engine.adapters import AdaptableEngine, AdapterError, Adapters, AdapterStore
from server.engine.wire import LoadAdapter

if TYPE_CHECKING:
    from model.config import LlamaConfig
    from model.network.lora import LoraWeights


class RunnersStore(AdapterStore, Protocol):
    """The adapters of this host, with their weights."""

    def weights(self, identity: int) -> LoraWeights:
        """Raises ValueError or OSError if they cannot be read any more."""


def make_store(settings: EngineSettings, config: LlamaConfig) -> RunnersStore | None:
    """The adapters in this host's memory. None: requests have none."""
    if not settings.enable_lora:
        return None
    from model.loading.adapter_store import AdapterStore

    max_cpu = settings.max_cpu_loras or 2 * settings.max_loras
    return AdapterStore(config, max_rank=settings.max_lora_rank, max_cpu=max_cpu)


def loaded_adapters(settings: EngineSettings, store: AdapterStore | None, engine: AdaptableEngine) -> Adapters | None:
    """The adapters' names, with those of the start loaded. ValueError if one of these cannot be used."""
    if store is None:
        return None
    adapters = Adapters(store, engine)
    for module in settings.adapters:
        try:
            adapters.change(LoadAdapter(module.name, module.path, module.base_model_name))
        except (AdapterError, ValueError, OSError) as error:
            raise ValueError(f"{FLAG} {module.name}={module.path}: {one_line(str(error))}") from error
    return adapters
