"""The memory of a step as the target's own compiler counts it, without the chip."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batcher.buckets import BucketLadder
from batcher.step import Bucket, Variant
from scripts.estimates.target import Target
from scripts.lab.planning.memory import Account, MemoryPlan, Sizes

if TYPE_CHECKING:
    from scripts.flags.settings import EngineSettings

SHALLOW = (1, 2)  # layers
_INSTALL = ".venv/bin/python -m pip install -c scripts/constraints.txt"
# Platform -> the module of its compiler, and the package that brings it. Both are in the extra `targets`.
_COMPILERS = {"tpu": ("libtpu", "libtpu"), "gpu": ("jax_cuda13_plugin", "jax-cuda13-plugin[with-cuda]")}
_SLICES = {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}  # of TPUs, by chips


@dataclass(frozen=True, kw_only=True)
class Question:
    """What `compile_steps` is asked for: one program of a plan, at several depths."""

    settings: EngineSettings
    target: Target
    chips: int
    topology: str | None  # as libtpu names it; None: GPUs
    num_pages: int
    bucket: Bucket
    depths: Sequence[int]  # numbers of layers


def obstacle(target: Target, chips: int) -> str | None:
    """Why a step of `chips` devices cannot be compiled here, and what to install; None: nothing is in the way."""
    module, package = _COMPILERS[target.platform]
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed: {_INSTALL} '{package}'"
    if target.platform == "tpu" and _slice(target, chips) is None:
        return f"there is no slice of {chips} {target.chip.name} devices to compile for"
    return None


def compiled_account(sizes: Sizes, settings: EngineSettings, memory: MemoryPlan, *, whole: bool) -> Account:
    """The step with the largest limits that returns log-probabilities: no program writes more. There is no `obstacle`.

    Args:
        whole: compiles all layers; otherwise one and two, of which the others are extrapolated.

    Raises:
        RuntimeError: the compiler refuses.
    """
    score = next(b for b in BucketLadder(memory.buckets).buckets() if b.variant is Variant.SCORE)
    depth = sizes.config.num_layers
    question = Question(
        settings=settings,
        target=sizes.target,
        chips=sizes.chips,
        topology=_slice(sizes.target, sizes.chips) if sizes.target.platform == "tpu" else None,
        num_pages=memory.num_pages,
        bucket=score,
        depths=(depth,) if whole else SHALLOW,
    )
    first, *second = _ask(question)
    return extrapolated(first, second[0], depth, memory.needs.temporaries) if second else first


def extrapolated(one: Account, two: Account, depth: int, bound: int) -> Account:
    """Every layer has the arguments of the second, and adds at most its temporaries: most are used again by the next
    layer. Compilers share the code of many layers, so nothing is said of it.

    Args:
        bound: of the temporaries, from shapes.
    """
    more = max(0, two.temporaries - one.temporaries)
    return Account(
        num_layers=depth,
        num_pages=two.num_pages,
        arguments=two.arguments + (depth - 2) * (two.arguments - one.arguments),
        temporaries=max(two.temporaries, min(bound, two.temporaries + (depth - 2) * more)),
        code=None,
        cpu_s=one.cpu_s + two.cpu_s,
        is_extrapolated=True,
    )


def _ask(question: Question) -> list[Account]:
    process = subprocess.run(
        [sys.executable, "-m", "scripts.lab.planning.compile_steps"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        input=pickle.dumps(question),
        capture_output=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"the step does not compile (--no-compile plans without): {process.stderr.decode()[-2000:]}")
    lines = [json.loads(line) for line in process.stdout.decode().splitlines() if line.startswith("{")]
    return [Account(**line, num_pages=question.num_pages) for line in lines]


def _slice(target: Target, devices: int) -> str | None:
    """The TPU slice of one replica, as libtpu names it; None: there is none."""
    chips = -(-devices // target.devices_per_process)
    shape = slice_name(target.chip.name, chips)
    return None if shape is None else f"{target.chip.name}:{shape}"


def slice_name(chip: str, count: int) -> str | None:
    """The topology of so many TPUs; None: there is none."""
    shape = _SLICES.get(count)
    return shape if shape is None or chip not in ("v5p", "tpu7x") else f"{shape}x1"
