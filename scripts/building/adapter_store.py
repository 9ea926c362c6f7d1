"""The LoRA adapters of an engine: their store, and the adapters and models that are loaded at the start."""

from __future__ import annotations

from batcher.engines import AnyEngine
from model.inputs.paths import Place
from model.inputs.words import one_line
from model.loading.adapter_store import AdapterStore as HostStore
from model.loading.source import NoAdapterError
from scripts.flags.lora import FLAG, MODELS
from scripts.flags.settings import EngineSettings
from server.engine.adapters import AdapterError, Adapters, AdapterStore, ModelStore
from server.engine.kv_events import KvEventPublisher
from server.engine.wire import LoadAdapter, LoadModel


class RunnersStore(HostStore):
    """The `server.engine.adapters.AdapterStore` of this host."""

    def load(self, path: str | Place) -> int:
        try:
            return super().load(path)
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
