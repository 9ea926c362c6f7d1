"""Traces and compiles the programs of a start in threads, while the caller loads the weights."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import jax

from model.compiling.compile_cache import CompileCounter, compiling_anew
from model.compiling.exported_programs import ExportedPrograms

Lower = Callable[[], jax.stages.Lowered]


class Compilation[K: Hashable]:
    """A compilation that begins when the object is made.

    Args:
        programs: for each program, a function that traces it. Tracing holds the interpreter's lock, so programs are
            traced one by one. They are compiled on as many threads as there are cores.
        options: the compiler's options for all programs.
        counter: counts the programs that come from the disk.
        exported: the programs of earlier starts, which are neither traced nor compiled. It also keeps the programs of
            this start. None: each start compiles all.
        only_trace: nothing is compiled until `result` is called.
    """

    def __init__(
        self,
        programs: Mapping[K, Lower],
        options: Mapping[str, Any],
        counter: CompileCounter,
        exported: ExportedPrograms[K] | None = None,
        *,
        only_trace: bool = False,
    ) -> None:
        self.tracing_s = 0.0
        self.num_from_disk = 0
        self.started_s = time.perf_counter()
        self._options = dict(options)
        self._counter = counter
        self._exported = exported
        self._anew = ExitStack()
        self._cancelled = threading.Event()
        self._may_compile = threading.Event()
        if not only_trace:
            self._may_compile.set()
        self._lock = threading.Lock()
        self._compiler = ThreadPoolExecutor(os.cpu_count())
        self._tracer = ThreadPoolExecutor(1)
        self._traced: Future[dict[K, Future[Any]]] = self._tracer.submit(self._trace, dict(programs))

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
        self._anew.close()

    def _trace(self, programs: dict[K, Lower]) -> dict[K, Future[Any]]:
        compiling, missing = self._load(programs)
        if missing and self._exported is not None:  # an executable from JAX's cache cannot be exported
            self._anew.enter_context(compiling_anew())
        for key in missing:
            if self._cancelled.is_set():
                break
            lower = programs[key]
            started = time.perf_counter()
            lowered = lower()
            self.tracing_s += time.perf_counter() - started
            compiling[key] = self._compiler.submit(self._compile, key, lowered)
        return {key: compiling[key] for key in programs if key in compiling}

    def _load(self, programs: dict[K, Lower]) -> tuple[dict[K, Future[Any]], list[K]]:
        """The programs that an earlier start exported, and the keys of the other programs."""
        if self._exported is None:
            return {}, list(programs)
        loading = {key: self._compiler.submit(self._exported.load, key) for key in programs}
        missing = [key for key, program in loading.items() if program.result() is None]
        return {key: program for key, program in loading.items() if key not in missing}, missing

    def _compile(self, key: K, lowered: jax.stages.Lowered) -> Any:
        self._may_compile.wait()
        if self._cancelled.is_set():
            raise CancelledError
        if self._exported is not None and (found := self._exported.load_lowered(key, lowered)) is not None:
            return found
        before = self._counter.from_cache_in_this_thread
        program = lowered.compile(compiler_options=self._options)
        from_disk = self._counter.from_cache_in_this_thread - before
        with self._lock:
            self.num_from_disk += from_disk
        if self._exported is not None and not from_disk:
            self._exported.store(key, program, lowered)
        return program
