"""Attention kernels that are faulty, and factories of engines over them, which a server's engine process calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import msgspec

from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import Backend
from scripts.wiring.backends import Backends, paged_attention
from scripts.wiring.engine import build, build_runner
from scripts.wiring.settings import EngineSettings
from tests.server.support import real_engine
from tests.server.support.real_engine import RealConfig


class _Faulty(PagedAttention):
    """The reference in the place of a chip's kernels: one form does not compile, the other gives no numbers."""

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
        if self.backend is Backend.GPU:
            raise NotImplementedError("no such instruction\nand much more about it")
        output, pages = self._reference(*arguments, **options)
        return output * float("nan"), pages


def _make(config: Any, backend: Backend, **options: Any) -> PagedAttention:
    attention = paged_attention(config, Backend.REFERENCE, **options)
    return attention if backend is Backend.REFERENCE else _Faulty(attention.spec, backend)


FALLBACK = Backends(candidates=lambda *_: (Backend.GPU, Backend.GPU_MMA, Backend.REFERENCE), make=_make)
NO_FALLBACK = Backends(candidates=lambda *_: (Backend.GPU_MMA,), make=_make)


def build_with_fallback(settings: EngineSettings, report: Callable[[str], None]) -> Any:
    """The start of a real engine until its programs would be compiled, which takes half a minute; then numpy's runner
    in the place of the compiled one."""
    built = build_runner(settings, report, backends=FALLBACK)
    engine, info = real_engine.build(RealConfig(), report)
    return engine, msgspec.structs.replace(info, attention=built.info.attention)


def build_without_fallback(settings: EngineSettings, report: Callable[[str], None]) -> Any:
    return build(settings, report, backends=NO_FALLBACK)
