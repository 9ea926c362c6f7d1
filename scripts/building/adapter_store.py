"""The LoRA adapters of an engine: their store, and the adapters and models that are loaded at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batcher.engines import AnyEngine
from model.inputs.words import one_line
from scripts.flags.lora import FLAG, MODELS
from scripts.flags.settings import EngineSettings
from server.engine.adapters import AdapterError, Adapters, AdapterStore, ModelStore
from server.engine.kv_events import KvEventPublisher
from server.engine.wire import LoadAdapter, LoadModel

if TYPE_CHECKING:
    from model.config import LlamaConfig


class RunnersStore:
    """The `server.engine.adapters.AdapterStore` of this host, over a runner."""

    def __init__(self, settings: EngineSettings, config: LlamaConfig) -> None:
        from model.loading.adapter_store import AdapterStore

        max_cpu = settings.max_cpu_loras or 2 * settings.max_loras
        self._store = AdapterStore(config, max_rank=settings.max_lora_rank, max_cpu=max_cpu)
        self.weights = self._store.weights
        self.forget = self._store.forget

    def load(self, path: str) -> int:
        """Loads the weights of a path or a hub name. Returns their identity.

        Raises ValueError or OSError if they cannot be used.
        """
        from model.loading.source import NoAdapterError, adapter_place

        try:
            return self._store.load(adapter_place(path))
        except NoAdapterError as error:
            raise AdapterError(f"lora_path: {error}", 404) from error


def loaded_adapters(
    settings: EngineSettings,
    store: AdapterStore | None,
    engine: AnyEngine,
    publisher: KvEventPublisher | None = None,
    models: ModelStore | None = None,
) -> Adapters | None:
    """The engine's `Adapters`, after loading the adapters and models of the settings. None: there are none.

    Raises ValueError if one cannot be used.

    Args:
        publisher: the publisher of K/V events, which name adapters; None: there is none.
    """
    if store is None and models is None:
        return None
    adapters = Adapters(store, engine, models)
    if publisher is not None:
        publisher.name_of = adapters.name_of
    changes: list[tuple[str, LoadAdapter | LoadModel]]
    changes = [(MODELS, LoadModel(each.name, each.path)) for each in settings.named_models]
    changes += [(FLAG, LoadAdapter(each.name, each.path, each.base_model_name)) for each in settings.adapters]
    for flag, change in changes:
        try:
            adapters.change(change)
        except (AdapterError, ValueError, OSError) as error:
            raise ValueError(f"{flag} {change.name}={change.path}: {one_line(str(error))}") from error
    return adapters
