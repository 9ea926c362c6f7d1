"""Loads what requests name as their models from a folder: LoRA adapters, or models."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from model.inputs.words import described
from server.engine.adapters import MAX_NAME_CHARS, AdapterError
from server.engine.wire import Adapter, IfLoaded, LoadAdapter, LoadedModel, LoadModel, Reply
from server.http.request_error import RequestError, internal, unavailable

REFUSED_S = 10.0  # the time for which a folder that cannot be used is not read again
MOST_REFUSED = 1024
MAX_FILE_NAME_BYTES = 255

Loaded = Adapter | LoadedModel
Load = type[LoadAdapter] | type[LoadModel]


class NamedFolder:
    """The adapters of `--lora-folder`, or the models of `--models-folder`. One is loaded when a request first names it,
    once for all requests that wait for it.

    Args:
        load: the kind of change that loads one.
        ask: asks the engines to load one.
    """

    def __init__(self, folder: Path, load: Load, ask: Callable[[LoadAdapter | LoadModel], Awaitable[Reply]]) -> None:
        self._folder = folder.absolute()
        self._change = load
        self._ask = ask
        self._loading: dict[str, asyncio.Task[Loaded | AdapterError | None]] = {}
        self._refused: dict[str, tuple[float, AdapterError]] = {}  # until when, and why

    async def load(self, name: str) -> Loaded | None:
        """What is in the folder of this name; None: there is no such folder. Raises RequestError."""
        if not is_file_name(name):
            return None
        until, refusal = self._refused.get(name, (0.0, None))
        if refusal is not None and time.monotonic() < until:
            raise self._error(refusal)
        loading = self._loading.get(name)
        if loading is None:
            loading = self._loading[name] = asyncio.create_task(self._load(name))
        found = await asyncio.shield(loading)  # it goes on if this request ends
        if isinstance(found, AdapterError):
            raise self._error(found)
        return found

    async def _load(self, name: str) -> Loaded | AdapterError | None:
        try:
            place = await asyncio.to_thread(self._place, name)
            if place is None:
                return None
            reply = await self._ask(self._change(name, str(place), if_loaded=IfLoaded.KEEP))
            if reply.error is None:
                return reply.loaded
            error = AdapterError(reply.error.replace(f"{self._folder}{os.sep}", ""), reply.status)  # clients read it
            if error.status < 500:
                if len(self._refused) >= MOST_REFUSED:
                    self._refused.clear()
                self._refused[name] = (time.monotonic() + REFUSED_S, error)
            return error
        except OSError as error:
            return AdapterError(described(error))
        finally:
            del self._loading[name]

    def _place(self, name: str) -> Path | None:
        """The path of a name; None: there is none. A link may lead to another folder inside the folder, but not out of
        it."""
        place = (self._folder / name).resolve()
        inside = place.is_relative_to(self._folder.resolve())
        return self._folder / name if inside and place.is_dir() else None

    def _error(self, error: AdapterError) -> RequestError:
        """The error of a request whose adapter or model cannot be used."""
        if error.status >= 500:
            return unavailable(str(error)) if error.status == 503 else internal(str(error))
        kind = "LoRA adapter" if self._change is LoadAdapter else "model"
        return RequestError(400, f"The {kind} cannot be used: {error}", param="model")


def is_file_name(name: str) -> bool:
    """Whether a file in a folder can have this name."""
    is_plain = 0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and not {"/", os.sep, os.altsep} & {*name}
    return is_plain and name not in (".", "..") and len(os.fsencode(name)) <= MAX_FILE_NAME_BYTES
