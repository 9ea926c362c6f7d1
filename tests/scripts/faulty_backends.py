"""Attention kernels that are faulty, and factories of engines over them, which a server's engine process calls."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from batcher.buckets import BucketConfig
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import AttentionSpec, Backend
from scripts.building.attention_backend import Backends, Chosen, choose_attention, paged_attention
from scripts.building.device import KeptFolders
from scripts.building.runner import build_runner, warm_engine
from scripts.flags.settings import EngineSettings
from server.engine.process import BuiltEngine
from tests.server.support import real_engine
from tests.server.support.real_engine import RealConfig


class Faulty(PagedAttention):
    """The reference in the place of a chip's kernels. Each subclass has one fault."""

    def __post_init__(self) -> None:
        """A chip's kernels take other shapes."""

    @property
    def _reference(self) -> PagedAttention:
        return PagedAttention(self.spec, Backend.REFERENCE)

    def kv_pages(self, num_pages: int) -> jax.ShapeDtypeStruct:
        return self._reference.kv_pages(num_pages)

    def make_metadata(self, *arguments: Any, **options: Any) -> Any:
        return self._reference.make_metadata(*arguments, **options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        output, pages = self._reference(*arguments, **options)
        return self.spoiled(output), pages

    def spoiled(self, output: jax.Array) -> jax.Array:
        raise NotImplementedError


class Faultless(Faulty):
    """With a GPU's layout, in which the pages are counted by the first axis."""

    def kv_pages(self, num_pages: int) -> jax.ShapeDtypeStruct:
        kinds, pages, *others = self._reference.kv_pages(num_pages).shape
        return jax.ShapeDtypeStruct((pages, kinds, *others), self.spec.kv_dtype)

    def __call__(self, queries: Any, keys: Any, values: Any, kv_pages: Any, *arguments: Any, **options: Any) -> Any:
        output, pages = self._reference(queries, keys, values, kv_pages.swapaxes(0, 1), *arguments, **options)
        return output, pages.swapaxes(0, 1)


class Refused(Faulty):
    def spoiled(self, output: jax.Array) -> jax.Array:
        raise NotImplementedError("no such instruction\nand much more about it")


class NoNumbers(Faulty):
    def spoiled(self, output: jax.Array) -> jax.Array:
        return output * float("nan")


class AtRun(Faulty):
    """The fault comes when the program runs."""

    def spoiled(self, output: jax.Array) -> jax.Array:
        return jax.pure_callback(self.fault, output, output)

    @staticmethod
    def fault(output: Any) -> Any:
        raise NotImplementedError


class Raising(AtRun):
    @staticmethod
    def fault(output: Any) -> Any:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")


class Dying(AtRun):
    @staticmethod
    def fault(output: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)


class Hanging(AtRun):
    @staticmethod
    def fault(output: Any) -> Any:
        threading.Event().wait()


def _make(config: Any, backend: Backend, **options: Any) -> PagedAttention:
    attention = paged_attention(config, Backend.REFERENCE, **options)
    kinds = {Backend.GPU: Refused, Backend.GPU_MMA: NoNumbers}
    return kinds[backend](attention.spec, backend) if backend in kinds else attention


FALLBACK = Backends(candidates=lambda *_: (Backend.GPU, Backend.GPU_MMA, Backend.REFERENCE), make=_make)
NO_FALLBACK = Backends(candidates=lambda *_: (Backend.GPU_MMA,), make=_make)


def in_the_place_of_a_gpus(kind: type[Faulty]) -> Backends:
    """Kernels that a child process tests, with the reference behind them."""

    def make(config: Any, backend: Backend, **options: Any) -> PagedAttention:
        attention = paged_attention(config, Backend.REFERENCE, **options)
        return kind(attention.spec, backend) if backend is Backend.GPU else attention

    return Backends(candidates=lambda *_: (Backend.GPU, Backend.REFERENCE), make=make)


def build_with_fallback(settings: EngineSettings, report: Callable[[str], None]) -> BuiltEngine:
    """The start of a real engine until its programs would be compiled, which takes half a minute; then numpy's runner
    in the place of the compiled one."""
    built = build_runner(settings, report, backends=FALLBACK)
    real = real_engine.build(RealConfig(), report)
    return replace(real, info=msgspec.structs.replace(real.info, attention=built.info.attention))


def build_without_fallback(settings: EngineSettings, report: Callable[[str], None]) -> BuiltEngine:
    built = build_runner(settings, report, compile_meanwhile=True, backends=NO_FALLBACK)
    return BuiltEngine(engine=warm_engine(built, report), info=built.info)


def choose_with_fallback(kind: type[Faulty], settings: EngineSettings, limit_s: float = 300.0) -> Chosen:
    """The choice between faulty kernels and the reference."""
    return choose(kind, settings, (Backend.GPU, Backend.REFERENCE), limit_s)


def send_choice(sender: Connection, kind: type[Faulty], settings: EngineSettings) -> None:
    sender.send(choose_with_fallback(kind, settings).info.failures)


def build_hanging(settings: EngineSettings, report: Callable[[str], None]) -> Any:
    """The start with kernels that hang, and that nothing can replace."""
    return choose(Hanging, settings, limit_s=0.5)


def choose(
    kind: type[Faulty],
    settings: EngineSettings,
    candidates: tuple[Backend, ...] = (Backend.GPU,),
    limit_s: float = 300.0,
    *,
    folder: Path | None = None,
    query_heads: int = 4,
    max_model_len: int = 32,
) -> Chosen:
    """The choice between faulty kernels and, if it is a candidate, the reference. `folder` is that of programs."""
    spec = AttentionSpec(
        num_query_heads=query_heads, num_kv_heads=2, head_dim=8, page_size=16, dtype=jnp.float32, kv_dtype=jnp.float32
    )
    return choose_attention(
        settings,
        candidates,
        lambda backend: (PagedAttention if backend is Backend.REFERENCE else kind)(spec, backend),
        BucketConfig(max_num_batched_tokens=2, max_num_seqs=1),
        platform="cpu",
        max_model_len=max_model_len,
        folders=KeptFolders(programs=folder),
        limit_s=limit_s,
    )
