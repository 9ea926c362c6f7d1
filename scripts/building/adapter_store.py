"""The LoRA adapters of an engine: their store, and the adapters that are loaded at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batcher.engine import Engine
from model.inputs.words import one_line
from scripts.flags.lora import FLAG
from scripts.flags.settings import EngineSettings
from server.engine.adapters import AdapterError, Adapters, AdapterStore
from server.engine.kv_events import KvEventPublisher
from server.engine.wire import LoadAdapter

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
    engine: Engine,
    publisher: KvEventPublisher | None = None,
) -> Adapters | None:
    """The engine's `Adapters`, after loading the adapters of the settings. None: LoRA is off.

    Raises ValueError if an adapter cannot be used.

    Args:
        publisher: the publisher of K/V events, which name adapters; None: there is none.
    """
    if store is None:
        return None
    adapters = Adapters(store, engine)
    if publisher is not None:
        publisher.name_of = adapters.name_of
    for module in settings.adapters:
        try:
            adapters.change(LoadAdapter(module.name, module.path, module.base_model_name))
        except (AdapterError, ValueError, OSError) as error:
            raise ValueError(f"{FLAG} {module.name}={module.path}: {one_line(str(error))}") from error
    return adapters
