"""The names of an engine's LoRA adapters and of its models, and the weights that each name has. Requests name weights
by their identity."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import msgspec

from batcher.request import Request, RequestOutput
from batcher.step import WeightsKind
from model.inputs.words import described, shown
from server.engine import wire

if TYPE_CHECKING:  # the HTTP process does without numpy
    from batcher.engines import AnyEngine

MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096


# The reason why an engine has no weights of a kind.
NONE_OF = {
    WeightsKind.ADAPTER: "This engine has no LoRA adapters: --enable-lora, or enable_lora=True in Python.",
    WeightsKind.MODEL: "This engine has one model only: --models, or models={...} in Python.",
}

# The fields of requests with the name and the path of such weights.
FIELDS_OF = {WeightsKind.ADAPTER: ("lora_name", "lora_path"), WeightsKind.MODEL: ("model", "path")}


def kind_of(change: wire.NamedChange) -> WeightsKind:
    """The kind of weights that a change concerns."""
    return WeightsKind.MODEL if isinstance(change, wire.LoadModel | wire.UnloadModel) else WeightsKind.ADAPTER


class AdapterError(ValueError):
    """An adapter or a model was not loaded or unloaded. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class AdapterStore(Protocol):
    """The weights of adapters in the memory of one host or of all hosts. `load` raises ValueError or OSError."""

    def load(self, path: str) -> int:
        """Loads the weights of a folder, a file or a hub name. Returns their identity.

        Raises AdapterError with status 404 if there are none.
        """

    def forget(self, identity: int) -> object:
        """Drops weights that no name and no request uses any more."""


class ModelStore(AdapterStore, Protocol):
    """The models of an engine besides its own one. `load` checks a model and adds it to the engine, and its weights are
    read when it runs. `forget` removes it there."""

    def loaded(self, name: str, identity: int, path: str) -> wire.LoadedModel:
        """The model under this name, for the HTTP processes."""


class _Named:
    """The weights of one kind, with the names that they have."""

    def __init__(self, store: AdapterStore) -> None:
        self.store = store
        self.loaded: dict[str, wire.Adapter | wire.LoadedModel] = {}  # by name
        self.held: dict[int, str] = {}  # identities that requests may have, and the names that they got last


class Adapters:
    """Maps the names of adapters and models to their weights. Thread-safe.

    Changes run on a separate thread, one after the other, so reading weights delays no step and no command.

    Args:
        store: the adapters; None: there are none.
        models: the models; None: there is one model only.
    """

    def __init__(self, store: AdapterStore | None, engine: AnyEngine, models: ModelStore | None = None) -> None:
        stores = {WeightsKind.ADAPTER: store, WeightsKind.MODEL: models}
        self._named = {kind: _Named(one) for kind, one in stores.items() if one is not None}
        self._models = models
        self._engine = engine
        self._changes = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._tell: Callable[[wire.Adapters], None] = lambda event: None
        self._lock = threading.Lock()  # of what follows, and of the order in which changes are told
        # A change that can be committed: the kind and the name, and what it is to name.
        self._prepared: tuple[WeightsKind, str, wire.Adapter | wire.LoadedModel | None] | None = None
        self._num_changes = self._num_adapter_loads = 0

    def listen(self, tell: Callable[[wire.Adapters], None]) -> None:
        """Registers `tell`, which is called with all adapters now and after each change."""
        self._tell = tell
        self.tell(tell)

    def tell(self, tell: Callable[[wire.Adapters], None]) -> None:
        """Calls `tell` with the current adapters, before any later change."""
        with self._lock:
            tell(self._event())

    def ask(self, command: wire.ChangePhase, answer: Callable[[wire.Reply], object]) -> None:
        """Schedules a phase of a change. COMMIT is answered after the new adapters have been sent to all HTTP
        processes."""
        self._changes.submit(self._answer, command, answer)

    def change(self, change: wire.NamedChange) -> wire.Adapter | wire.LoadedModel:
        """Makes a whole change. Called at the start, and on this object's own thread.

        Raises AdapterError, ValueError or OSError if the change cannot be made.
        """
        found = self._prepare(change)
        self._commit()
        return found

    def add_request(self, request: Request, on_output: Callable[[RequestOutput], None]) -> None:
        """Adds a request to the engine. Raises AdapterError with status 404 if its adapter or its model has been
        unloaded since the request was checked."""
        if not request.adapter and not request.model:
            self._engine.add_request(request, on_output)
            return
        asked = {WeightsKind.ADAPTER: request.adapter, WeightsKind.MODEL: request.model}
        with self._lock:
            for kind, named in self._named.items():
                if asked[kind] and asked[kind] not in named.held:
                    raise AdapterError(f"The {kind} has been unloaded.", 404)
            self._engine.add_request(request, on_output)

    def name_of(self, identity: int) -> str | None:
        """The last name of these weights; None: they have been forgotten."""
        return next((named.held[identity] for named in self._named.values() if identity in named.held), None)

    def forget_unused(self) -> None:
        """Forgets the weights that have no name and no request. The engine process calls it regularly."""
        with self._lock:
            has_unnamed = any(self._unnamed(kind) for kind in self._named)
        if has_unnamed:
            self._changes.submit(self._forget_unused)

    def close(self) -> None:
        """Drops the changes that have not begun."""
        self._changes.shutdown(wait=False, cancel_futures=True)

    def _answer(self, command: wire.ChangePhase, answer: Callable[[wire.Reply], object]) -> None:
        told = wire.Reply(number=command.number)
        try:
            match command.phase, command.change:
                case wire.Phase.PREPARE, change if not isinstance(change, wire.ChangeWeights):
                    told.loaded = self._prepare(change)
                case wire.Phase.COMMIT, _:
                    self._commit()
                case _:
                    self._abandon()
        except AdapterError as error:
            told.error, told.status = str(error), error.status
        except (ValueError, OSError) as error:
            told.error = described(error)
        except Exception as error:
            traceback.print_exc()
            told.error, told.status = described(error), 500
        answer(told)

    def _prepare(self, change: wire.NamedChange) -> wire.Adapter | wire.LoadedModel:
        """Reads the weights of a load. They get their name in `_commit`."""
        self._abandon()
        kind = kind_of(change)
        if kind not in self._named:
            raise AdapterError(NONE_OF[kind])
        named = self._named[kind]
        before = named.loaded.get(change.name)
        if isinstance(change, wire.UnloadAdapter | wire.UnloadModel):
            if before is None:
                raise AdapterError(f"The {kind} {shown(change.name)} is not loaded.", 404)
            self._check_unchanged(before)
            self._prepared = (kind, change.name, None)
            return before
        if before is not None and change.if_loaded is wire.IfLoaded.KEEP:
            return before
        if before is not None and change.if_loaded is wire.IfLoaded.REFUSE:
            again = "`load_inplace` loads it again"
            raise AdapterError(f"The {kind} {shown(change.name)} is loaded already: {again}.")
        self._check_unchanged(before)
        name_field, path_field = FIELDS_OF[kind]
        check_name(change.name, name_field)
        if any(change.name in other.loaded for other in self._named.values() if other is not named):
            raise AdapterError(f"{name_field}: an adapter or a model has the name {shown(change.name)} already.")
        check_name(change.path, path_field, "path", MAX_PATH_CHARS)
        identity = named.store.load(change.path)
        found: wire.Adapter | wire.LoadedModel
        if isinstance(change, wire.LoadAdapter):
            found = wire.Adapter(change.name, identity, change.path, change.base_model, self._model_below(change))
        else:
            assert self._models is not None
            found = self._models.loaded(change.name, identity, change.path)
            found = msgspec.structs.replace(found, load=self._num_changes + 1)
        with self._lock:
            self._prepared = (kind, change.name, found)
            named.held.setdefault(identity, change.name)
        return found

    def _model_below(self, change: wire.LoadAdapter) -> int:
        """The identity of the model that the adapter changes."""
        for each in self._all_loaded():
            if isinstance(each, wire.LoadedModel) and each.name == change.base_model:
                if not each.max_loras:
                    raise AdapterError(f"base_model_name: {shown(each.name)} has another shape than --model.")
                return each.identity
        return 0

    def _check_unchanged(self, before: wire.Adapter | wire.LoadedModel | None) -> None:
        """Raises AdapterError for a model that an adapter changes."""
        for each in self._all_loaded():
            if before is not None and isinstance(each, wire.Adapter) and each.model == before.identity:
                raise AdapterError(f"The LoRA adapter {shown(each.name)} changes this model: unload the adapter first.")

    def _all_loaded(self) -> list[wire.Adapter | wire.LoadedModel]:
        return [each for named in self._named.values() for each in named.loaded.values()]

    def _commit(self) -> None:
        if self._prepared is None:
            return
        kind, name, found = self._prepared
        named = self._named[kind]
        with self._lock:
            self._num_changes += 1
            self._num_adapter_loads += isinstance(found, wire.Adapter)
            self._prepared = None
            if found is None:
                del named.loaded[name]
            else:
                named.loaded[name] = found
                named.held[found.identity] = name
            self._tell(self._event())
        self._forget_unused()

    def _abandon(self) -> None:
        if self._prepared is not None:
            self._prepared = None
            self._forget_unused()

    def _event(self) -> wire.Adapters:
        adapters = [each for each in self._all_loaded() if isinstance(each, wire.Adapter)]
        models = [each for each in self._all_loaded() if isinstance(each, wire.LoadedModel)]
        return wire.Adapters(adapters, self._num_changes, self._num_adapter_loads, models)

    def _unnamed(self, kind: WeightsKind) -> set[int]:
        named = self._named[kind]
        coming = None if self._prepared is None else self._prepared[2]
        all_named = [*named.loaded.values(), *([] if coming is None else [coming])]
        return named.held.keys() - {each.identity for each in all_named}

    def _forget_unused(self) -> None:
        for kind, named in self._named.items():
            with self._lock:
                unused = self._unnamed(kind)
                unused -= self._engine.in_use(kind) if unused else set()
                for identity in unused:
                    del named.held[identity]
            for identity in unused:
                named.store.forget(identity)


def check_name(name: str, where: str, what: str = "name", most: int = MAX_NAME_CHARS) -> None:
    """Raises ValueError for a name that no adapter and no model may have, or for a path. The message begins with
    `where`, the flag or field."""
    if not (0 < len(name) <= most and name.isprintable()):
        raise ValueError(f"{where}: a {what} has 1 to {most} printable characters, not {shown(name)}")
