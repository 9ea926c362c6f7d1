"""Traces and compiles the programs of a start in threads, while the caller loads the weights."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from model.compiling.compile_cache import CompileCounter

Lower = Callable[[], jax.stages.Lowered]


class Compilation[K: Hashable]:
    """A compilation that begins when the object is made.

    Args:
        programs: a function that traces each. Tracing holds the interpreter's lock, so programs are traced one by one.
            They are compiled on as many threads as there are cores.
        options: of the compiler, for all programs.
        counter: counts the programs that come from the disk.
    """

    def __init__(self, programs: Mapping[K, Lower], options: Mapping[str, Any], counter: CompileCounter) -> None:
        self.tracing_s = 0.0
        self.num_from_disk = 0
        self.started_s = time.perf_counter()
        self._options = dict(options)
        self._counter = counter
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._compiler = ThreadPoolExecutor(os.cpu_count())
        self._tracer = ThreadPoolExecutor(1)
        self._traced: Future[dict[K, Future[Any]]] = self._tracer.submit(self._trace, dict(programs))

    def result(self) -> dict[K, Any]:
        """Waits for the executables and returns them in the order of the programs. An error of tracing or compiling is
        raised after the threads have ended."""
        try:
            return {key: program.result() for key, program in self._traced.result().items()}
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Starts no further program, and waits for those that are being traced or compiled."""
        self._cancelled.set()
        self._tracer.shutdown()
        self._compiler.shutdown(cancel_futures=True)

    def _trace(self, programs: dict[K, Lower]) -> dict[K, Future[Any]]:
        compiling = {}
        for key, lower in programs.items():
            if self._cancelled.is_set():
                break
            started = time.perf_counter()
            lowered = lower()
            self.tracing_s += time.perf_counter() - started
            compiling[key] = self._compiler.submit(self._compile, lowered)
        return compiling

    def _compile(self, lowered: jax.stages.Lowered) -> Any:
        before = self._counter.from_cache_in_this_thread
        program = lowered.compile(compiler_options=self._options)
        with self._lock:
            self.num_from_disk += self._counter.from_cache_in_this_thread - before
        return program
