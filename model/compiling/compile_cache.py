"""JAX's cache of compiled programs, on disk, and a counter of compilations: none may happen after warm-up."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, override

import jax
from jax._src import compilation_cache as jax_cache  # private: JAX has no public name for a cache of one's own
from jax._src.compilation_cache_interface import CacheInterface
from jax.experimental.compilation_cache import compilation_cache

from model.compiling.kept_files import KeptFiles
from model.inputs.paths import Place

COMPILED = "/jax/core/compile/backend_compile_duration"  # also recorded if the executable came from the disk
_looked_up = threading.local()  # what JAX has last asked `ProgramCache` for in this thread


class ProgramCache(CacheInterface):
    """JAX's cache of compiled programs in a folder, with checksums: a damaged program is made again.

    JAX's own writes an entry in place, and never replaces one that it cannot read.
    """

    def __init__(self, files: KeptFiles) -> None:
        self._files = files
        self._path: Any = files.folder
        self.is_only_filled = False  # True: nothing is looked up, and a program that cannot be stored is an error

    @override
    def get(self, key: str) -> bytes | None:
        found = None if self.is_only_filled else self._files.read(file_of(key))
        _looked_up.last = (self._path, key, found is not None)
        return found

    @override
    def put(self, key: str, value: bytes) -> None:
        self._files.write(file_of(key), value)
        if self.is_only_filled and self._files.read(file_of(key)) != value:
            raise OSError(f"{self._path} cannot be written to")


def file_of(key: str) -> str:
    """The path in the folder of programs of the compiled program that has this key in JAX's cache."""
    return f"xla/{key}.xla"


def executable_in(entry: bytes) -> bytes:
    """The executable, as XLA serialises it, in an entry of JAX's cache."""
    executable, _ = jax_cache.extract_executable_and_time(jax_cache.decompress_executable(entry))
    return executable


class Made(NamedTuple):
    """A compiled program."""

    executable: jax.stages.Compiled
    folder: Place | None  # of the `ProgramCache` that has it; None: JAX has asked none for it
    key: str  # its key there
    is_from_disk: bool


def compile_lowered(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> Made:
    """Compiles a program with these compiler options, unless JAX's cache has it."""
    _looked_up.last = (None, "", False)
    executable = lowered.compile(compiler_options=dict(options))
    return Made(executable, *_looked_up.last)


def compile_as_timed(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> Made | None:
    """Compiles a program for a GPU that is only described, with the kernels that such a GPU has found fastest. None: it
    has not timed all of the program's products.

    A fusion without a product may have another form there, under which it was not timed. XLA then takes its default.
    """
    complete = {**options, "xla_gpu_require_complete_aot_autotune_results": True}
    with suppress(jax.errors.JaxRuntimeError):
        return compile_lowered(lowered, complete)
    try:
        products = compile_lowered(lowered, complete | {"xla_gpu_experimental_enable_fusion_autotuner": False})
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith("NOT_FOUND"):
            return None
        raise
    if products.folder is not None:
        KeptFiles(products.folder).delete(file_of(products.key))
    return compile_lowered(lowered, options)


def keep_compilations(folder: Place) -> None:
    """Stores every program that this process compiles from now on in `folder`, and looks programs up there.

    By default JAX keeps only programs that took a second or more. A start compiles many shorter ones. A folder that
    cannot be written to is a warning.

    Raises:
        ValueError: there is no such bucket, access is denied, or another user could write to the folder.
    """
    cache = ProgramCache(KeptFiles(folder))
    if not os.access(str(folder), os.W_OK):  # XLA's own cache of a GPU's autotuning must be writable
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    jax_cache.get_file_cache = lambda path: (cache, path)
    compilation_cache.reset_cache()  # JAX makes its cache once
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@contextmanager
def filling() -> Iterator[None]:
    """A context in which every compiled program is stored in the cache, and none is looked up. It is for a process with
    described devices, which cannot load programs. If a program cannot be stored, its compilation raises OSError."""
    cache, _ = jax_cache.get_file_cache("") or (None, "")
    assert isinstance(cache, ProgramCache), "keep_compilations comes first"
    raises, cache.is_only_filled = jax.config.jax_raise_persistent_cache_errors, True
    jax.config.update("jax_raise_persistent_cache_errors", True)
    try:
        yield
    finally:
        cache.is_only_filled = False
        jax.config.update("jax_raise_persistent_cache_errors", raises)


_is_expecting = ContextVar("whether programs that are compiled are expected", default=False)


@contextmanager
def expecting_compiles() -> Iterator[None]:
    """A context in which no counter counts the programs that the calling thread compiles. Threads with a copy of its
    context do not count, either."""
    before = _is_expecting.set(True)
    try:
        yield
    finally:
        _is_expecting.reset(before)


class CompileCounter:
    """Counts all programs that this process has compiled, or read from the disk, since the counter was made.

    A `jnp` call outside a compiled step, or a jitted function with a new shape, compiles too. Both stop the engine
    while the compiler runs, and the runner itself does not see them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # programs are compiled in several threads
        self._total = 0
        jax.monitoring.register_event_duration_secs_listener(_forward(weakref.ref(self)))

    @property
    def total(self) -> int:
        """The number of programs so far, without those compiled in `expecting_compiles`."""
        return self._total

    def count(self, event: str) -> None:
        if event == COMPILED and not _is_expecting.get():
            with self._lock:
                self._total += 1


def _forward(counter: weakref.ref[CompileCounter]) -> Callable[..., None]:
    """A listener that holds its counter weakly, and does nothing after the counter is gone. It cannot be removed while
    other threads compile, because they iterate over JAX's list of listeners."""

    def listen(event: str, duration_s: float, **_: object) -> None:
        if (target := counter()) is not None:
            target.count(event)

    return listen
