"""The memory of a step as the target's own compiler counts it, without the chip."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batcher.buckets import BucketConfig, BucketLadder
from batcher.step import Bucket, Variant
from scripts.lab.accounts.process import CompilerError, printed_by
from scripts.lab.planning.memory import Account, MemoryPlan, Sizes, size_up
from scripts.lab.planning.target import Target

if TYPE_CHECKING:
    from model.execution.step_programs import StepPrograms
    from scripts.flags.settings import EngineSettings

SHALLOW = (1, 2)  # layers
_INSTALL = ".venv/bin/python -m pip install -c scripts/constraints.txt"
# Platform -> the module of its compiler, and the package that brings it. Both are in the extra `targets`.
_COMPILERS = {"tpu": ("libtpu", "libtpu"), "gpu": ("jax_cuda13_plugin", "jax-cuda13-plugin[with-cuda]")}
_SLICES = {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}  # of TPUs, by chips


@dataclass(frozen=True, kw_only=True)
class Described:
    """What decides the programs of a server, for a process that compiles them."""

    settings: EngineSettings
    target: Target
    chips: int
    num_pages: int

    def programs(self, num_layers: int) -> tuple[StepPrograms, AbstractContextManager[None]]:
        """The programs of a model with so many layers, and a context that compiles for the target. Only in a process
        that has the compiler's environment before it imports jax."""
        from model.execution.step_programs import StepPrograms
        from model.network.packed import pack_for_tpu
        from model.network.sharding import make_mesh
        from scripts.building.limits import runner_config
        from scripts.lab.accounts.targets import target_named

        target, chips, settings = self.target, self.chips, self.settings
        described = target_named(self.topology)
        mesh = make_mesh(chips, described.devices()[:chips])
        sizes = size_up(settings, target, chips, mesh=mesh, num_layers=num_layers)
        if target.platform == "tpu":
            pack_for_tpu(sizes.model, mesh)
        limits = runner_config(settings, self.buckets, sizes.max_model_len)
        return StepPrograms(sizes.model, sizes.attention, limits, self.num_pages, None), described.compiling(mesh)

    @property
    def topology(self) -> str:
        """The chips of one replica, as `target_named` reads them. There is no `obstacle`."""
        if self.target.platform != "tpu":
            return f"{self.chips}x{self.target.chip.name}"
        name = _slice(self.target, self.chips)
        assert name is not None, "there is an obstacle"
        return name

    @property
    def buckets(self) -> BucketConfig:
        """The shapes of its steps."""
        from scripts.building.limits import bucket_config

        return bucket_config(self.settings, self.target.platform, self.chips)


@dataclass(frozen=True, kw_only=True)
class Question(Described):
    """What the compiler's process is asked for: one program of a plan, at several depths."""

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
    try:
        lines = printed_by(__name__, stdin=pickle.dumps(question))
    except CompilerError as error:
        raise RuntimeError(f"the step does not compile (--no-compile plans without): {error}") from error
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


def _answer(asked: Question) -> None:
    """Prints an account of each depth: in a process that has the compiler's environment before it imports jax."""
    from model.compiling.compiler_options import compiler_options

    for num_layers in asked.depths:
        programs, compiling = asked.programs(num_layers)
        begin = time.process_time()
        with compiling:
            lowered = programs.step(asked.bucket).lower()
            options = compiler_options(asked.target.platform)
            memory: Any = lowered.compile(compiler_options=options).memory_analysis()
        answer = {
            "num_layers": num_layers,
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
            "cpu_s": time.process_time() - begin,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _answer(pickle.load(sys.stdin.buffer))  # from the process that has started this one
