"""Compiles a runner's programs, or loads them from the disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax

from batcher.step import Bucket, longest_first
from model.compiling.compilation import Compilation
from model.compiling.compile_cache import CompileCounter, compiling_anew
from model.compiling.compiler_options import compiler_options
from model.compiling.exported_programs import ExportedPrograms, executable_fingerprint
from model.compiling.traced_programs import Program, TracedPrograms, fingerprint
from model.execution import dequantized_copies, memory_plan
from model.execution.device_memory import device_memory, return_freed_memory
from model.execution.step_programs import BRING_MASKS, PATCH, RESET_HISTORY, WRITE_ADAPTER, StepPrograms
from model.inputs.paths import Place

_PACKAGES = [Path(__file__).parents[2] / name for name in ("batcher", "model", "pallas_kernels")]  # the programs' code


class CompiledPrograms:
    """The executables of a runner.

    Args:
        described: the programs.
        traced_folder, export_folder: the arguments of `ModelRunner`.
        planned_room: the bytes that the plan has left for temporaries. A host reports more free memory, because pages
            that no step has used, and weights that are mapped from a file, count as free. Infinite: the device reports
            the right number.
    """

    def __init__(
        self,
        described: StepPrograms,
        *,
        traced_folder: Place | None,
        export_folder: Path | None,
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
        self.untried: set[Bucket] = set()  # buckets whose programs an earlier start exported, and that have not run yet
        self._described = described
        self._planned_room = planned_room
        self._counter = CompileCounter()
        self._traced_folder = traced_folder
        self._traced: TracedPrograms | None = None
        self._export_folder = export_folder
        self._exported: ExportedPrograms[Bucket | str] | None = None
        self._compilation: Compilation[Bucket | str] | None = None

    @property
    def num_compiles(self) -> int:
        """The number of programs that this process has compiled, or read from the disk, since the runner was made. It
        includes unplanned programs, but not those of `compile_later`."""
        return self._counter.total

    def expecting(self) -> AbstractContextManager[None]:
        """A context in which programs that the calling thread compiles are not counted. It is for the programs that
        make weights: a start that maps its weights from a file has not compiled them."""
        return self._counter.expecting()

    @property
    def exported(self) -> Container[Bucket | str]:
        """The programs that an earlier start has exported."""
        return set() if self._exported is None else self._exported.found

    def fingerprint(self) -> str:
        """A digest of all facts that decide what the programs compute, other than their arguments."""
        return fingerprint(_PACKAGES, self._described.made_from, self._described.device)

    def start_compiling(
        self, buckets: Iterable[Bucket], may_wait: Collection[Bucket] = (), *, only_trace: bool = False
    ) -> None:
        """Starts compiling in threads. `compile` with the same buckets waits for the programs. A caller that does not
        call `compile` must call `stop_compiling`; otherwise the process exits only after the last program.

        Args:
            may_wait: buckets whose programs are left for `compile_later`, except programs on the disk.
            only_trace: nothing is compiled before `compile` is called.
        """
        described = self._described
        self._find_traced()
        programs: dict[Bucket | str, Program] = {bucket: described.step(bucket) for bucket in longest_first(buckets)}
        self.left = list(may_wait)
        if self._export_folder is None:
            self.left = [bucket for bucket in may_wait if not self._is_on_disk(bucket, programs[bucket])]
        programs.update(described.updates())
        if self._export_folder is not None:
            names = {key: described.name(key) for key in programs}
            made_from, of_machine = (
                executable_fingerprint(packages, facts, described.device, self._options)
                for packages, facts in ((_PACKAGES, described.made_from), ((), ()))
            )
            self._exported = ExportedPrograms(
                self._export_folder, made_from, dict(programs), names, of_machine=of_machine
            )
        for bucket in self.left:
            del programs[bucket]
        lower = {key: partial(self._lower, key, program) for key, program in programs.items()}
        self._compilation = Compilation(lower, self._options, self._counter, self._exported, only_trace=only_trace)

    def untraced(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """The buckets whose programs must be traced: the disk has neither the traced program nor the executable. It is
        empty if this runner cannot use what another process traces. Call it after `start_compiling`."""
        if self._traced is None or self._exported is not None:
            return []
        return [bucket for bucket in buckets if not self._is_on_disk(bucket, self._described.step(bucket))]

    def trace(self, buckets: Iterable[Bucket]) -> None:
        """Traces the buckets' programs that are not on the disk, and stores them there for another process."""
        self._find_traced()
        for bucket in buckets:
            program = self._described.step(bucket)
            if not self._is_on_disk(bucket, program):
                self._lower(bucket, program)

    def _find_traced(self) -> None:
        if self._traced_folder is not None:
            self._traced = TracedPrograms(self._traced_folder, self.fingerprint())

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
        self._check_dequantized_copies(self.steps, report)
        report(self._account(compilation, waiting_since))

    def compile_later(self, bucket: Bucket, report: Callable[[str], None]) -> None:
        """Compiles the program of a bucket that `compile` has left, or loads it if it was exported. Other threads may
        execute steps. Its memory is not checked, because the largest programs are compiled before.

        Raises:
            ValueError: the program writes dequantised copies of weights (`dequantized_copies.check`).
        """
        program = None if self._exported is None else self._exported.load(bucket)
        if program is None:
            program = self._compiled_now(bucket)
        else:
            self.untried.add(bucket)
        self._check_dequantized_copies({bucket: program}, report)
        self.steps[bucket] = program
        return_freed_memory()

    def compile_anew(self, report: Callable[[str], None]) -> None:
        """Compiles all programs again, and deletes the files of the exported ones."""
        assert self._exported is not None
        self._exported.discard(list(self._exported.found))
        self.untried.clear()
        self.compile([*self.steps, *self.left], report, self.left)

    def compile_in_place(self, bucket: Bucket) -> None:
        """Compiles one program again, and deletes the file of the exported one."""
        assert self._exported is not None
        self._exported.discard([bucket])
        self.steps[bucket] = self._compiled_now(bucket)

    def _compiled_now(self, bucket: Bucket) -> jax.stages.Compiled:
        """Compiles a program without counting it, and exports it. If an equal lowered program was exported, it is
        loaded instead."""
        before = self._counter.from_cache_in_this_thread
        with self._counter.expecting(), nullcontext() if self._exported is None else compiling_anew():
            lowered = self._lower(bucket, self._described.step(bucket))
            if self._exported is not None and (found := self._exported.load_lowered(bucket, lowered)) is not None:
                self.untried.add(bucket)
                return found
            program = lowered.compile(compiler_options=self._options)
        if self._exported is not None and self._counter.from_cache_in_this_thread == before:
            self._exported.store(bucket, program, lowered)
        return program

    @property
    def _options(self) -> dict[str, Any]:
        return compiler_options(self._described.device.platform)

    def _lower(self, key: Bucket | str, program: Program) -> jax.stages.Lowered:
        """The lowered program. Its trace comes from the disk, or it is traced now."""
        return program.lower() if self._traced is None else self._traced.lower(self._described.name(key), program)

    def _is_on_disk(self, bucket: Bucket, program: Program) -> bool:
        return self._traced is not None and self._traced.has(self._described.name(bucket), program)

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

    def _check_dequantized_copies(self, programs: dict[Bucket, Any], report: Callable[[str], None]) -> None:
        described = self._described
        for remark in dequantized_copies.check(
            programs, described.quantized_kernels, described.model_config, described.attention
        ):
            report(remark)

    def _account(self, compilation: Compilation[Bucket | str], waiting_since: float) -> str:
        now = time.perf_counter()
        num_compiled = len(self.steps) + len(self._described.updates())
        early = f", {now - waiting_since:.1f} s of them after loading" if waiting_since > compilation.started_s else ""
        before = "" if self._traced is None else f", {self._traced.num_found} were traced before"
        if self._exported is not None and self._exported.found:
            before += f", {len(self._exported.found)} more were exported before"
            num_compiled -= len(self._exported.found)
        later = f"; {len(self.left)} more come while serving" if self.left else ""
        return (
            f"compiled {num_compiled} programs in {now - compilation.started_s:.1f} s{early} "
            f"({compilation.num_from_disk} came from the disk; tracing took {compilation.tracing_s:.1f} s{before})"
            f"{later}"
        )
