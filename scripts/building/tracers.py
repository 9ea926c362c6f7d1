"""Processes that trace programs for an engine on a chip. The engine reads their results instead of tracing itself.

Tracing holds the interpreter's lock, so a process traces one program after the other. An H100's host took up to 5 s for
one program (`scripts/lab/results/2026-11-26-h100.md`), and reading one takes less than a tenth of a second. The engine
takes the programs from one end of their list, and these processes from the other end. The engine traces a program that
is not on the disk yet, and never waits for these processes.

On a GPU each process has its own CUDA context, without a memory pool. A TPU belongs to the engine, so these processes
use a description of it, like `scripts.precompile`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from batcher.step import Bucket, longest_first
from model.inputs.words import described
from pallas_kernels.chips import GPU_POOL_SHARE
from scripts.building.described_chips import attached_topology, be_on, topology_named
from scripts.flags.settings import EngineSettings
from server.engine.child_process import end_with_parent, start_without_main

if TYPE_CHECKING:
    from model.execution.runner import ModelRunner

logger = logging.getLogger("pallas_serve")

GIB = 1 << 30
MOST = 4
CORES_EACH = 4
CONTEXT_BYTES = 3 * GIB // 4  # a process's CUDA context, which is outside the engine's pool
LEFT_FREE_BYTES = 3 * GIB  # memory outside the pool that the engine's own context and programs need
LEAST_PROGRAMS = 6  # with fewer programs, the engine has traced them before a process has started
LIMIT_S = 300.0
# In a process that only describes chips, libtpu logs errors about what it does not find of them.
QUIET = {"TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3"}
Build = Callable[[EngineSettings], Any]  # -> `runner.Built`


def num_tracers(
    platform: str, *, cores: int, pool_bytes: int, num_programs: int, pool_share: float = GPU_POOL_SHARE
) -> int:
    """The number of processes for which there is enough work and memory.

    Args:
        pool_bytes: the size of the engine's pool on a GPU, which is `pool_share` of its memory.
        num_programs: the number of programs that no earlier start has traced.
    """
    if platform not in ("gpu", "tpu") or num_programs < LEAST_PROGRAMS:
        return 0
    most = min(MOST, cores // CORES_EACH)
    if platform == "tpu":
        return most
    outside = int(pool_bytes / pool_share * (1 - pool_share))
    return max(0, min(most, (outside - LEFT_FREE_BYTES) // CONTEXT_BYTES))


def trace_ahead(
    runner: ModelRunner, settings: EngineSettings, buckets: Iterable[Bucket], platform: str, build: Build
) -> None:
    """Starts processes that trace the programs that `runner` has not found on the disk. `runner` traces at the same
    time. The processes end when all programs are on the disk.

    Args:
        settings: the engine's settings, with the chosen backend, context and chips.
        build: builds a runner of these settings that only has programs. It is pickled.
    """
    from model.execution.device_memory import device_memory

    if platform == "cpu" or multiprocessing.current_process().daemon:  # a daemonic process may not have children
        return
    untraced = runner.programs.untraced(longest_first(buckets))
    count = num_tracers(
        platform,
        cores=os.cpu_count() or 1,
        pool_bytes=device_memory(runner.described.device).total,
        num_programs=len(untraced),
        pool_share=float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_POOL_SHARE)),
    )
    try:
        target = attached_topology() if platform == "tpu" and count else None
        start_tracers(replace(settings, num_pages=runner.capacity().num_pages), untraced, count, build, target)
    except Exception as error:  # the engine then traces all programs itself
        logger.warning("no other process traces programs: %s", described(error))


def start_tracers(
    settings: EngineSettings, buckets: Sequence[Bucket], count: int, build: Build, target: str | None = None
) -> list[BaseProcess]:
    """Starts `count` processes, which trace the last ones of `buckets` first.

    Args:
        settings: the engine's settings, with the chosen backend, context, chips and number of pages.
        target: the TPUs that are described to the processes; None: they use the device.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    for index in range(count):
        share = buckets[::-1][index::count]
        process = context.Process(
            target=_trace, args=(settings, share, pickle.dumps(build), target), name=f"tracer-{index}", daemon=True
        )
        start_without_main(process)
        processes.append(process)
    return processes


def _trace(settings: EngineSettings, buckets: Sequence[Bucket], build: bytes, target: str | None) -> None:
    """The work of one process. `build` is pickled: its module imports jax, which must find the described chips."""
    end_with_parent()
    limit = threading.Timer(LIMIT_S, os._exit, (1,))
    limit.daemon = True
    limit.start()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the engine's pool has most of the memory
    os.environ |= QUIET
    try:
        if target is not None:
            be_on(topology_named(target))
        pickle.loads(build)(settings).runner.programs.trace(buckets)
    except Exception as error:
        logger.warning("a process that traces programs has ended, and the engine traces them: %s", described(error))
