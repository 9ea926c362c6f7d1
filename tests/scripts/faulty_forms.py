"""A test of a form of the kernels with faults, which a child process of the part `kernels` imports."""

from __future__ import annotations

import os
import signal
from typing import Any

from pallas_kernels.api import PagedAttention
from scripts.lab.chip import kernels


def test_form(model: str, backend: Any, kv_dtype: str, options: Any, poisons: bool) -> dict[str, Any]:
    right = PagedAttention.__call__

    def wrong(self: PagedAttention, *arguments: Any, **options: Any) -> Any:
        output, pages = right(self, *arguments, **options)
        return (output + 1 if self.spec.has_kv_scales else output), pages

    PagedAttention.__call__ = wrong  # type: ignore[method-assign]
    if kv_dtype == "float16":
        os.kill(os.getpid(), signal.SIGSEGV)
    return kernels.test_form(model, backend, kv_dtype, options, poisons)
