"""The names of an engine's LoRA adapters, and the weights that each has. Requests name weights by their identity."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from batcher.request import Request, RequestOutput
from batcher.step import WeightsKind
from model.inputs.words import described, shown
from server.engine import wire

if TYPE_CHECKING:  # the HTTP process does without numpy
    from batcher.engine import Engine

MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096


class AdapterError(ValueError):
    """An adapter was not loaded or unloaded. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class AdapterStore(Protocol):
    """The weights of adapters in the memory of one host or of all hosts. `load` raises ValueError or OSError."""

    def load(self, path: str) -> int:
        """Loads the weights of a folder, a file or a hub name. Returns their identity.

        Raises AdapterError with status 404 if there are none.
        """

    def forget(self, identity: int) -> None:
        """Drops weights that no name and no request uses any more."""


class Adapters:
    """Maps the names of adapters to their weights. Thread-safe.

    Changes run on a separate thread, one after the other, so reading weights delays no step and no command.
    """

    def __init__(self, store: AdapterStore, engine: Engine) -> None:
        self._store = store
        self._engine = engine
        self._changes = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._tell: Callable[[wire.Adapters], None] = lambda event: None
        self._lock = threading.Lock()  # of what follows, and of the order in which changes are told
        self._loaded: dict[str, wire.Adapter] = {}  # by name
        self._held: dict[int, str] = {}  # identities that requests may have, and the names that they got last
        self._prepared: tuple[str, wire.Adapter | None] | None = None  # a name, and what it is to name
        self._num_changes = self._num_loads = 0

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

    def change(self, change: wire.AdapterChange) -> wire.Adapter:
        """Makes a whole change. Called at the start, and on this object's own thread.

        Raises AdapterError, ValueError or OSError if the change cannot be made.
        """
        adapter = self._prepare(change)
        self._commit()
        return adapter

    def add_request(self, request: Request, on_output: Callable[[RequestOutput], None]) -> None:
        """Adds a request to the engine. Raises AdapterError with status 404 if its adapter has been unloaded since the
        request was checked."""
        if not request.adapter:
            self._engine.add_request(request, on_output)
            return
        with self._lock:
            if request.adapter not in self._held:
                raise AdapterError("The LoRA adapter has been unloaded.", 404)
            self._engine.add_request(request, on_output)

    def name_of(self, identity: int) -> str | None:
        """The last name of these weights; None: they have been forgotten."""
        return self._held.get(identity)

    def forget_unused(self) -> None:
        """Forgets the weights that have no name and no request. The engine process calls it regularly."""
        with self._lock:
            has_unnamed = bool(self._unnamed())
        if has_unnamed:
            self._changes.submit(self._forget_unused)

    def close(self) -> None:
        """Drops the changes that have not begun."""
        self._changes.shutdown(wait=False, cancel_futures=True)

    def _answer(self, command: wire.ChangePhase, answer: Callable[[wire.Reply], object]) -> None:
        told = wire.Reply(number=command.number)
        try:
            match command.phase, command.change:
                case wire.Phase.PREPARE, (wire.LoadAdapter() | wire.UnloadAdapter()) as change:
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

    def _prepare(self, change: wire.AdapterChange) -> wire.Adapter:
        """Reads the weights of a load. They get their name in `_commit`."""
        self._abandon()
        before = self._loaded.get(change.name)
        if isinstance(change, wire.UnloadAdapter):
            if before is None:
                raise AdapterError(f"The LoRA adapter {shown(change.name)} is not loaded.", 404)
            self._prepared = (change.name, None)
            return before
        if before is not None and change.if_loaded is wire.IfLoaded.KEEP:
            return before
        if before is not None and change.if_loaded is wire.IfLoaded.REFUSE:
            message = f"The LoRA adapter {shown(change.name)} is loaded already: `load_inplace` loads it again."
            raise AdapterError(message)
        check_name(change.name, "lora_name")
        _check_path(change.path)
        identity = self._store.load(change.path)
        adapter = wire.Adapter(change.name, identity, change.path, change.base_model)
        with self._lock:
            self._prepared = (change.name, adapter)
            self._held.setdefault(identity, change.name)
        return adapter

    def _commit(self) -> None:
        if self._prepared is None:
            return
        name, adapter = self._prepared
        with self._lock:
            self._num_changes += 1
            self._num_loads += adapter is not None
            self._prepared = None
            if adapter is None:
                del self._loaded[name]
            else:
                self._loaded[name] = adapter
                self._held[adapter.identity] = name
            self._tell(self._event())
        self._forget_unused()

    def _abandon(self) -> None:
        if self._prepared is not None:
            self._prepared = None
            self._forget_unused()

    def _event(self) -> wire.Adapters:
        return wire.Adapters(list(self._loaded.values()), self._num_changes, self._num_loads)

    def _unnamed(self) -> set[int]:
        coming = None if self._prepared is None else self._prepared[1]
        named = [*self._loaded.values(), *([] if coming is None else [coming])]
        return self._held.keys() - {adapter.identity for adapter in named}

    def _forget_unused(self) -> None:
        with self._lock:
            unused = self._unnamed()
            unused -= self._engine.in_use(WeightsKind.ADAPTER) if unused else set()
            for identity in unused:
                del self._held[identity]
        for identity in unused:
            self._store.forget(identity)


def check_name(name: str, where: str) -> None:
    """Raises ValueError for a name that no adapter may have. The message begins with `where`, the flag or field."""
    if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable()):
        raise ValueError(f"{where}: a name has 1 to {MAX_NAME_CHARS} printable characters, not {shown(name)}")


def _check_path(path: str) -> None:
    if not (0 < len(path) <= MAX_PATH_CHARS and path.isprintable()):
        raise ValueError(f"lora_path: a path has 1 to {MAX_PATH_CHARS} printable characters, not {shown(path)}")
