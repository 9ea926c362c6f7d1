"""Keeps compiled programs on disk between starts, and counts compilations: none may happen after warm-up."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import override

import jax
import jaxlib
from jax._src import compilation_cache as jax_cache  # private: JAX has no public name for a cache of one's own
from jax._src.compilation_cache_interface import CacheInterface
from jax.experimental.compilation_cache import compilation_cache

from model.compiling.program_files import ProgramFiles, check_private
from model.inputs.paths import Place
from model.inputs.remote import RemotePath

_JAX_FILE_CACHE = jax_cache.get_file_cache
COMPILED = "/jax/core/compile/backend_compile_duration"  # also recorded if the executable came from the disk
CACHE_HIT = "/jax/compilation_cache/cache_hits"
BUCKETS = ("gs", "s3")  # schemes of the object stores that JAX reaches


class CheckedCache(CacheInterface):
    """JAX's cache of compiled programs in a folder, with checksums: a damaged program is made again.

    JAX's own writes an entry in place, and never replaces one that it cannot read.

    Args:
        folder: a folder to which only this user may write, because a compiled program runs as code.

    Raises:
        ValueError: another user could write to the folder.
    """

    def __init__(self, folder: Path) -> None:
        if folder.is_dir():
            check_private(folder, "--compile-cache")
        self._files = ProgramFiles(
            folder / "xla", jaxlib.__version__, kind="compiled program", suffix=".xla", private_to="--compile-cache"
        )
        self._path = folder

    @property
    def keeps(self) -> bool:
        """Whether the folder can be written to."""
        return self._files.keeps

    @override
    def get(self, key: str) -> bytes | None:
        return self._files.read(self._files.path(key))

    @override
    def put(self, key: str, value: bytes) -> None:
        self._files.write(self._files.path(key), value)


def keep_compilations(folder: Place) -> None:
    """Stores every program that this process compiles from now on in `folder`, and looks programs up there.

    By default JAX keeps only programs that took a second or more. A start compiles many shorter ones. A folder that
    cannot be written to is a warning.

    Raises:
        ValueError: JAX does not reach the object store, there is no such bucket, access is denied, or another user
            could write to the folder.
    """
    if isinstance(folder, RemotePath):
        if folder.scheme not in BUCKETS:
            kinds = " and ".join(f"{scheme}://" for scheme in BUCKETS)
            raise ValueError(f"{folder}: JAX keeps programs in a folder or on {kinds} only")
        folder.check_bucket()
        jax_cache.get_file_cache = _JAX_FILE_CACHE
    else:
        cache = CheckedCache(folder)
        if not cache.keeps:  # XLA's own cache of a GPU's autotuning must be writable
            jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        jax_cache.get_file_cache = lambda path: (cache, path)
    compilation_cache.reset_cache()  # JAX makes its cache once
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


class _Filled(CacheInterface):
    """A cache that is only written to."""

    def __init__(self, cache: CacheInterface) -> None:
        self._cache = cache
        self._path = cache._path

    @override
    def get(self, key: str) -> bytes | None:
        return None

    @override
    def put(self, key: str, value: bytes) -> None:
        self._cache.put(key, value)
        if self._cache.get(key) != value:
            raise OSError(f"{self._path} cannot be written to")


@contextmanager
def filling() -> Iterator[None]:
    """A context in which every compiled program is stored in the cache, and none is looked up. It is for a process with
    described devices, which cannot load programs. If a program cannot be stored, its compilation raises OSError."""
    made, raises = jax_cache.get_file_cache, jax.config.jax_raise_persistent_cache_errors

    def filled(path: str) -> tuple[CacheInterface, str] | None:
        cache = made(path)
        return None if cache is None else (_Filled(cache[0]), cache[1])

    jax_cache.get_file_cache = filled
    _raise_errors(True)
    try:
        yield
    finally:
        jax_cache.get_file_cache = made
        _raise_errors(raises)


def _raise_errors(raises: bool) -> None:
    jax.config.update("jax_raise_persistent_cache_errors", raises)
    compilation_cache.reset_cache()  # JAX makes its cache once


@contextmanager
def compiling_anew() -> Iterator[None]:
    """A context in which no thread of this process reads a program from the cache or stores one there."""
    enabled = jax.config.jax_enable_compilation_cache
    _enable(False)
    try:
        yield
    finally:
        _enable(enabled)


def _enable(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()  # JAX reads the option once


_expecting: ContextVar[tuple[CompileCounter, ...]] = ContextVar("counters that expect what is compiled", default=())


class CompileCounter:
    """Counts all programs that this process has compiled, or read from the disk, since the counter was made.

    A `jnp` call outside a compiled step, or a jitted function with a new shape, compiles too. Both stop the engine
    while the compiler runs, and the runner itself does not see them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # programs are compiled in several threads
        self._total = 0
        self._cached_here = threading.local()
        jax.monitoring.register_event_duration_secs_listener(_forward_duration(weakref.ref(self)))
        jax.monitoring.register_event_listener(_forward_event(weakref.ref(self)))

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """A context in which programs that the calling thread compiles are not counted. Threads with a copy of its
        context do not count, either."""
        before = _expecting.set((*_expecting.get(), self))
        try:
            yield
        finally:
            _expecting.reset(before)

    @property
    def total(self) -> int:
        """The number of programs so far, without those compiled in `expecting`."""
        return self._total

    @property
    def from_cache_in_this_thread(self) -> int:
        """The number of programs that the calling thread has read from the disk."""
        return getattr(self._cached_here, "count", 0)

    def count(self, event: str) -> None:
        if event == COMPILED and self not in _expecting.get():
            with self._lock:
                self._total += 1
        elif event == CACHE_HIT:
            self._cached_here.count = self.from_cache_in_this_thread + 1


# A listener cannot be removed while other threads compile, because they iterate over JAX's list of listeners. So a
# listener holds its counter by a weak reference and does nothing after the counter is gone.


def _forward_duration(counter: weakref.ref[CompileCounter]) -> Callable[..., None]:
    def listen(event: str, duration_s: float, **_: object) -> None:
        if (target := counter()) is not None:
            target.count(event)

    return listen


def _forward_event(counter: weakref.ref[CompileCounter]) -> Callable[..., None]:
    def listen(event: str, **_: object) -> None:
        if (target := counter()) is not None:
            target.count(event)

    return listen
