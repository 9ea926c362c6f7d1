"""The test of the tests: a kernel with a fault in its synchronisation must not pass them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.api import AttentionSpec
from pallas_kernels.tpu import paging
from tests.pallas_kernels.dense import Row, make_case
from tests.pallas_kernels.tpu.interpreted import DMA_MODES, compiled_step, run

SPEC = AttentionSpec(
    num_query_heads=4, num_kv_heads=2, head_dim=128, page_size=16, dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16
)
ROWS = [Row(query_len=1, kv_len=300), Row(query_len=1, kv_len=150), Row(query_len=70, kv_len=280)]

wait_words, fetch = paging.wait_words, paging.fetch


def no_wait(block: Any, num_words: Any, sem: Any) -> None:
    pass


def wait_for_less(block: Any, num_words: Any, sem: Any) -> None:
    wait_words(block, num_words - 1, sem)


def wait_for_one_page(block: Any, num_words: Any, sem: Any) -> None:
    wait_words(block, jnp.minimum(num_words, 8), sem)


def of_another_row(pages: Any, row: Any, begin: Any, end: Any, block: Any, sem: Any) -> None:
    fetch(pages, 1 - jnp.minimum(row, 1), begin, end, block, sem)


def forget_compiled() -> None:
    """A fault is patched in while the kernels are traced."""
    compiled_step.cache_clear()
    jax.clear_caches()


def findings() -> list[str]:
    """What the harness sees, in both DMA modes together."""
    found = []
    for dma_mode in DMA_MODES:
        forget_compiled()
        case = make_case(SPEC, ROWS, num_tokens=80, num_rows=4, pages_per_seq=20)
        result = run(case, dma_mode)
        found += [name for name, value in vars(result).items() if value]
    forget_compiled()
    return found


def test_no_fault_no_findings() -> None:
    assert findings() == []


@pytest.mark.parametrize("fault", [no_wait, wait_for_less, wait_for_one_page])
def test_faulty_waits(fault: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "wait_words", fault)
    assert "semaphores" in findings()


def test_a_copy_of_the_wrong_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """(A copy of too few words is caught as well, but by a wait that never ends: no test.)"""
    monkeypatch.setattr(paging, "fetch", of_another_row)
    assert "error" in findings()
