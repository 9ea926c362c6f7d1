"""Keeps compiled programs on disk between starts, and counts compilations, so that one after warm-up is noticed."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"  # also recorded where the executable came from the disk
CACHE_HIT = "/jax/compilation_cache/cache_hits"


def keep_compilations(folder: Path | str) -> None:
    """From now on every program that this process compiles is kept in `folder` and looked up there.

    JAX by default keeps only programs that took a second or more; a start-up is the sum of many shorter ones.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


class CompileCounter:
    """Counts the programs that this process has readied to run since the counter was made, by whatever caller.

    A `jnp` call outside a compiled step is a compilation too, and so is a function met with a new shape: both stop the
    engine for as long as the compiler takes, and neither shows in the runner's own books.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # programs are compiled in several threads
        self._total = 0
        self._cached_here = threading.local()
        jax.monitoring.register_event_duration_secs_listener(_forward_duration(weakref.ref(self)))
        jax.monitoring.register_event_listener(_forward_event(weakref.ref(self)))

    @property
    def total(self) -> int:
        """Programs that were readied so far."""
        return self._total

    @property
    def from_cache_in_this_thread(self) -> int:
        """How many of those that the calling thread asked for were read from the disk."""
        return getattr(self._cached_here, "count", 0)

    def count(self, event: str) -> None:
        if event == COMPILED:
            with self._lock:
                self._total += 1
        elif event == CACHE_HIT:
            self._cached_here.count = self.from_cache_in_this_thread + 1


# JAX keeps its listeners for good: every thread that compiles walks the list of them. A listener therefore stays when
# its counter is gone, and does nothing.


def _forward_duration(counter: weakref.ref[CompileCounter]):
    def listen(event: str, duration_s: float, **_: object) -> None:
        if (target := counter()) is not None:
            target.count(event)

    return listen


def _forward_event(counter: weakref.ref[CompileCounter]):
    def listen(event: str, **_: object) -> None:
        if (target := counter()) is not None:
            target.count(event)

    return listen
