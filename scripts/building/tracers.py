"""Processes that trace programs next to an engine on a chip, which reads what they have kept instead of tracing it.

Tracing holds the interpreter's lock: one process traces one program after the other. An H100's host took up to 5 s for
one (`scripts/lab/results/2026-11-26-h100.md`), and reading one takes less than a tenth of a second. The engine takes
the programs from one end of their list and these processes from the other. It traces a program that none of them has
kept yet, and waits for nobody.

On a GPU each has a CUDA context of its own, without a pool. A TPU belongs to the engine, and these processes have its
description only, as `scripts.precompile` does.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from batcher.step import Bucket, longest_first
from model.inputs.words import described
from scripts.building.device import GPU_POOL_SHARE
from scripts.building.tpu_topology import attached_topology, be_on, tpu_topology
from scripts.flags.settings import EngineSettings
from server.engine.child_process import end_with_parent, start_without_main

if TYPE_CHECKING:
    from model.execution.runner import ModelRunner

logger = logging.getLogger("pallas_serve")

GIB = 1 << 30
MOST = 4
CORES_EACH = 4
CONTEXT_BYTES = 3 * GIB // 4  # CUDA's context of a process, outside the engine's pool
LEFT_FREE_BYTES = 3 * GIB  # there, for the engine's own context and its programs
LEAST_PROGRAMS = 6  # fewer are traced by the time that a process has started
LIMIT_S = 300.0
# In a process that only describes chips, libtpu logs errors about what it does not find of them.
QUIET = {"TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3"}
Build = Callable[[EngineSettings], Any]  # -> `build.Built`


def num_tracers(
    platform: str, *, cores: int, pool_bytes: int, num_programs: int, pool_share: float = GPU_POOL_SHARE
) -> int:
    """How many processes are worth their start, and have room.

    Args:
        pool_bytes: a GPU's: the engine's pool, which is `pool_share` of its memory.
        num_programs: that no earlier start has traced.
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
    """Starts processes that trace what `runner`, which has begun to trace, has not found on the disk. They end when all
    of it is there.

    Args:
        settings: the engine's, with what it has chosen: backend, context and chips.
        build: a runner of these settings that only has programs. It is pickled.
    """
    from model.execution.device_memory import device_memory

    if platform == "cpu" or multiprocessing.current_process().daemon:  # which may not have children
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
    except Exception as error:  # the engine traces what nobody else does
        logger.warning("no other process traces programs: %s", described(error))


def start_tracers(
    settings: EngineSettings, buckets: Sequence[Bucket], count: int, build: Build, target: str | None = None
) -> list[BaseProcess]:
    """`count` processes, which trace the last ones of `buckets` first.

    Args:
        settings: as of `trace_ahead`, with pages.
        target: the TPUs that are described to the processes; None: they use the device.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    for index in range(count):
        share = buckets[::-1][index::count]
        process = context.Process(
            target=_trace, args=(settings, share, build, target), name=f"tracer-{index}", daemon=True
        )
        start_without_main(process)
        processes.append(process)
    return processes


def _trace(settings: EngineSettings, buckets: Sequence[Bucket], build: Build, target: str | None) -> None:
    """The work of one process."""
    end_with_parent()
    limit = threading.Timer(LIMIT_S, os._exit, (1,))
    limit.daemon = True
    limit.start()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the engine's pool has most of the memory
    os.environ |= QUIET
    try:
        if target is not None:
            be_on(tpu_topology(target))
        build(settings).runner.programs.trace(buckets)
    except Exception as error:
        logger.warning("a process that traces programs has ended, and the engine traces them: %s", described(error))
