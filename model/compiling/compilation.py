"""Traces and compiles the programs of a start in threads, while the caller loads the weights."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import jax

from model.compiling.compile_cache import Made, compile_lowered

Lower = Callable[[], jax.stages.Lowered]


class Compilation[K: Hashable]:
    """A compilation that begins when the object is made.

    Args:
        programs: for each program, a function that traces it. Tracing holds the interpreter's lock, so programs are
            traced one by one. They are compiled on as many threads as there are cores.
        options: the compiler's options for all programs.
        load: returns the executable of an earlier start, which is neither traced nor compiled; None: there is none.
        keep: keeps what was compiled for later starts.
        only_trace: nothing is compiled until `result` is called.
    """

    def __init__(
        self,
        programs: Mapping[K, Lower],
        options: Mapping[str, Any],
        *,
        load: Callable[[K], Any] = lambda key: None,
        keep: Callable[[K, Made], None] = lambda key, made: None,
        only_trace: bool = False,
    ) -> None:
        self.tracing_s = 0.0
        self.started_s = time.perf_counter()
        self._options = options
        self._load = load
        self._keep = keep
        self._cancelled = threading.Event()
        self._may_compile = threading.Event()
        if not only_trace:
            self._may_compile.set()
        self._compiler = ThreadPoolExecutor(os.cpu_count())
        self._tracer = ThreadPoolExecutor(1)
        self._traced = self._tracer.submit(copy_context().run, self._trace, dict(programs))

    def result(self) -> dict[K, Any]:
        """Waits for the executables and returns them in the order of the programs. Errors of tracing or compiling are
        raised after the threads have ended."""
        self._may_compile.set()
        try:
            return {key: program.result() for key, program in self._traced.result().items()}
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Starts no further program, and waits for those that are being traced or compiled."""
        self._cancelled.set()
        self._may_compile.set()
        self._tracer.shutdown()
        self._compiler.shutdown(cancel_futures=True)

    def _trace(self, programs: dict[K, Lower]) -> dict[K, Future[Any]]:
        found = {key: self._compiler.submit(copy_context().run, self._load, key) for key in programs}
        for key in [key for key, program in found.items() if program.result() is None]:
            if self._cancelled.is_set():
                break
            started = time.perf_counter()
            lowered = programs[key]()
            self.tracing_s += time.perf_counter() - started
            found[key] = self._compiler.submit(copy_context().run, self._compile, key, lowered)
        return found

    def _compile(self, key: K, lowered: jax.stages.Lowered) -> Any:
        self._may_compile.wait()
        if self._cancelled.is_set():
            raise CancelledError
        made = compile_lowered(lowered, self._options)
        self._keep(key, made)
        return made.executable
