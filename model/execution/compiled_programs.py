"""Compiles a runner's programs, or loads them from the disk."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from batcher.step import Bucket, longest_first
from model.compiling.compilation import Compilation
from model.compiling.compile_cache import CompileCounter, Made, compile_as_timed, compile_lowered, expecting_compiles
from model.compiling.compiler_options import compiler_options
from model.compiling.program import Program, fingerprint
from model.compiling.program_store import ProgramStore, executable_fingerprint
from model.execution import memory_plan
from model.execution.device_memory import device_memory, return_freed_memory
from model.execution.step_programs import BRING_MASKS, PATCH, RESET_HISTORY, WRITE_ADAPTER, StepPrograms
from model.inputs.paths import Place
from model.inputs.words import detail

_PACKAGES = [Path(__file__).parents[2] / name for name in ("batcher", "model", "pallas_kernels")]  # the programs' code


class CompiledPrograms:
    """The executables of a runner.

    Args:
        described: the programs.
        folder, keeps_executables: the arguments of `ModelRunner`.
        planned_room: the bytes that the plan has left for temporaries. A host reports more free memory, because pages
            that no step has used, and weights that are mapped from a file, count as free. Infinite: the device reports
            the right number.
    """

    def __init__(
        self,
        described: StepPrograms,
        *,
        folder: Place | None,
        keeps_executables: bool,
        planned_room: float = math.inf,
    ) -> None:
        self.steps: dict[Bucket, Any] = {}
        self.patch: Any
        self.bring_masks: Any
        self.reset_history: Any
        self.write_adapter: Any  # None: there are no adapters
        self.read_pages: dict[int, Any] = {}  # number of pages -> program; empty: pages do not move
        self.write_pages: dict[int, Any] = {}
        self.left: list[Bucket] = []  # buckets for `compile_later`
        self.from_disk: set[Bucket | str] = set()  # programs of an earlier start that `compile_anew` can make again
        self.untried: set[Bucket] = set()  # those of `from_disk` that have not run yet
        self._described = described
        self._planned_room = planned_room
        self._counter = CompileCounter()
        self._programs: dict[Bucket | str, Program] = {}
        self._loaded: set[Bucket | str] = set()  # programs of an earlier start that were neither traced nor lowered
        self._compiled_before: set[Bucket | str] = set()  # programs of an earlier start that were lowered
        self._store: ProgramStore | None = None
        if folder is not None:
            traced_from = self.fingerprint()
            compiled_from = executable_fingerprint(traced_from, self._options) if keeps_executables else None
            self._store = ProgramStore(folder, traced_from, compiled_from)
        self._compilation: Compilation[Bucket | str] | None = None

    @property
    def num_compiles(self) -> int:
        """The number of programs that this process has compiled, or read from the disk, since the runner was made. It
        includes unplanned programs, but not those of `compile_later`."""
        return self._counter.total

    def fingerprint(self) -> str:
        """A digest of all facts that decide what the programs compute, other than their arguments."""
        return fingerprint(_PACKAGES, self._described.made_from, self._described.device)

    def start_compiling(
        self, buckets: Iterable[Bucket], may_wait: Collection[Bucket] = (), *, only_trace: bool = False
    ) -> None:
        """Starts compiling in threads. `compile` with the same buckets waits for the programs. A caller that does not
        call `compile` must call `stop_compiling`; otherwise the process exits only after the last program.

        Args:
            may_wait: buckets whose programs are left for `compile_later`.
            only_trace: nothing is compiled before `compile` is called.
        """
        self._programs = self._all(buckets)
        self.left = list(may_wait)
        lower = {key: partial(self._lower, key) for key in self._programs if key not in self.left}
        self._compilation = Compilation(lower, self._options, load=self._load, keep=self._keep, only_trace=only_trace)

    def untraced(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """The buckets whose programs must be traced, because an earlier start has not kept them. It is empty if this
        runner cannot use what another process traces."""
        store = self._store
        return [] if store is None else [b for b in buckets if not store.has(self._name(b), self._described.step(b))]

    def _all(self, buckets: Iterable[Bucket]) -> dict[Bucket | str, Program]:
        """The programs of a start."""
        return {bucket: self._described.step(bucket) for bucket in longest_first(buckets)} | self._described.updates()

    def trace(self, buckets: Iterable[Bucket]) -> None:
        """Traces the buckets' programs that are not on the disk, and stores them there for another process."""
        for bucket in self.untraced(buckets):
            self._programs[bucket] = self._described.step(bucket)
            self._lower(bucket)

    def make_elsewhere(self, buckets: Iterable[Bucket], *, compiles: bool) -> int:
        """Traces all programs for GPUs that are only described, and also compiles them if `compiles`. They are kept.

        Returns the number of compiled programs. The others have products that no such GPU has timed: XLA's default
        kernels would make them slow.
        """
        self._programs, compiled = self._all(buckets), {}
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for key in self._programs:
                lowered = self._lower(key)
                if compiles:
                    compiled[key] = threads.submit(compile_as_timed, lowered, self._options)
        made = {key: program for key, future in compiled.items() if (program := future.result()) is not None}
        for key, program in made.items():
            self._keep(key, program)
        return len(made)

    def stop_compiling(self) -> None:
        """Cancels the compilation that `start_compiling` started."""
        if self._compilation is not None:
            self._compilation.cancel()

    def compile(
        self, buckets: Iterable[Bucket], report: Callable[[str], None], may_wait: Collection[Bucket] = ()
    ) -> None:
        """Compiles every bucket's program, in parallel.

        Args:
            may_wait: the argument of `start_compiling`.

        Raises:
            ValueError: the temporaries of the programs need more memory than the device has free.
        """
        buckets, waiting_since = list(buckets), time.perf_counter()
        if self._compilation is None:
            self.start_compiling(buckets, may_wait)
        compilation, self._compilation = self._compilation, None
        assert compilation is not None
        programs = compilation.result()
        self.patch, self.reset_history = programs.pop(PATCH), programs.pop(RESET_HISTORY)
        self.bring_masks, self.write_adapter = programs.pop(BRING_MASKS), programs.pop(WRITE_ADAPTER, None)
        if (copies := self._described.page_copies) is not None:
            self.read_pages = {size: programs.pop(copies.name("read", size)) for size in copies.sizes}
            self.write_pages = {size: programs.pop(copies.name("write", size)) for size in copies.sizes}
        if programs.keys() | set(self.left) != set(buckets):
            raise ValueError("start_compiling was given other buckets than warm_up")
        self.steps = {bucket: programs[bucket] for bucket in buckets if bucket in programs}
        return_freed_memory()
        self._check_temporaries()
        report(self._account(compilation, waiting_since))

    def compile_later(self, bucket: Bucket) -> None:
        """Compiles the program of a bucket that `compile` has left, or loads it from the disk. Other threads may
        execute steps. Its memory is not checked, because the largest programs are compiled before."""
        program = self._load(bucket) or self._compiled_now(bucket)
        if bucket in self.from_disk:
            self.untried.add(bucket)
        self.steps[bucket] = program
        return_freed_memory()

    def compile_anew(self, report: Callable[[str], None]) -> None:
        """Compiles all programs again, and deletes the files of those that came from the disk."""
        self._discard(list(self.from_disk))
        self.untried.clear()
        self.compile([*self.steps, *self.left], report, self.left)

    def compile_in_place(self, bucket: Bucket) -> None:
        """Compiles one program again, and deletes its files."""
        self._discard([bucket])
        self.steps[bucket] = self._compiled_now(bucket)

    def _compiled_now(self, bucket: Bucket) -> Any:
        """Compiles a program without counting it, and keeps it."""
        with expecting_compiles():
            made = compile_lowered(self._lower(bucket), self._options)
        self._keep(bucket, made)
        return made.executable

    def _lower(self, key: Bucket | str) -> jax.stages.Lowered:
        """The lowered program. Its trace comes from the disk, or it is traced now."""
        program = self._programs[key]
        return program.lower() if self._store is None else self._store.lower(self._name(key), program)

    def _load(self, key: Bucket | str) -> jax.stages.Compiled | None:
        """The executable of an earlier start; None: there is none."""
        executable = None if self._store is None else self._store.load(self._name(key), self._programs[key])
        if executable is not None:
            self.from_disk.add(key)
            self._loaded.add(key)
        return executable

    def _keep(self, key: Bucket | str, made: Made) -> None:
        is_kept = self._store is not None and self._store.keep(self._name(key), self._programs[key], made)
        if made.is_from_disk:
            self._compiled_before.add(key)
            if is_kept:
                self.from_disk.add(key)

    def _discard(self, keys: Iterable[Bucket | str]) -> None:
        for key in keys:
            assert self._store is not None, "they came from it"
            self._store.discard(self._name(key), self._programs[key])
            for found in (self.from_disk, self._loaded, self._compiled_before):
                found.discard(key)

    def _name(self, key: Bucket | str) -> str:
        return self._described.name(key)

    @property
    def _options(self) -> dict[str, Any]:
        return compiler_options(self._described.device.platform)

    def _check_temporaries(self) -> None:
        """Raises ValueError if the largest temporaries that the compiler reports exceed the free memory. The memory
        plan used only an upper bound from shapes."""
        if self._described.config.num_pages is not None:
            return  # the caller has chosen the memory
        largest = max(program.memory_analysis().temp_size_in_bytes for program in self.steps.values())
        free = min(device_memory(self._described.device).free, self._planned_room)
        if largest > free:
            raise ValueError(
                f"the largest program needs {largest / memory_plan.GIB:.2f} GiB besides its arguments and only "
                f"{free / memory_plan.GIB:.2f} GiB are free: lower --memory-utilization or --max-num-batched-tokens"
            )

    def _account(self, compilation: Compilation[Bucket | str], waiting_since: float) -> str:
        now = time.perf_counter()
        num_compiled = len(self.steps) + len(self._described.updates())
        early = f", {now - waiting_since:.1f} s of them after loading" if waiting_since > compilation.started_s else ""
        before = "" if self._store is None else f", {self._store.num_traces_found} were traced before"
        if self._loaded:
            before += f", {len(self._loaded)} more were exported before"
            num_compiled -= len(self._loaded)
        later = f"; {len(self.left)} more come while serving (--compile-all-first waits for them)" if self.left else ""
        origins = f"{len(self._compiled_before)} came from the disk; tracing took {compilation.tracing_s:.1f} s{before}"
        took = f"{now - compilation.started_s:.1f} s"
        return f"compiled {num_compiled} programs in {took}{detail(f'{early} ({origins})')}{later}"
