"""The test of the tests: a kernel with a fault in its synchronisation, addresses or masks must not pass them.

Faults that make the interpreter wait for ever (a copy of too few words, a wait for more than is sent) have no test.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.spec import AttentionSpec
from pallas_kernels.tpu import append, entries, paging, spec_decode, tiles
from tests.pallas_kernels.dense import Row, make_case
from tests.pallas_kernels.tpu.interpreted import DMA_MODES, compiled_step, run

SPEC = AttentionSpec(
    num_query_heads=4, num_kv_heads=2, head_dim=128, page_size=16, dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16
)
DECODES = [Row(query_len=1, kv_len=300), Row(query_len=1, kv_len=150)]
CHUNKS = [Row(query_len=70, kv_len=281)]
DRAFTS = [Row(query_len=3, kv_len=40), Row(query_len=9, kv_len=281)]  # with 8 slots: one chunk, and two
# Turns of two blocks with 64, 128 and 64 words: two turns that signal each other's semaphore wait for as much as comes.
EVEN_TURNS = [Row(query_len=1, kv_len=kv_len) for kv_len in (65, 65, 128, 128, 65, 65)]

wait_words, fetch, write = paging.wait_words, paging.fetch, append.Appender.write


def forget_compiled() -> None:
    """A fault is patched in while the kernels are traced."""
    compiled_step.cache_clear()
    jax.clear_caches()


def findings(
    rows: list[Row], spec: AttentionSpec = SPEC, *, enough: Set[str] = frozenset(), few: bool = False
) -> set[str]:
    """What the harness sees, in both DMA modes together; in the first one only where that shows one of `enough`."""
    found = set()
    forget_compiled()
    for dma_mode in DMA_MODES:
        case = make_case(spec, rows, num_tokens=32 if few else 80, num_rows=4 if few else 8, pages_per_seq=20)
        try:
            result = run(case, dma_mode, spec_decode=few)
        except jax.errors.JaxRuntimeError as error:
            if "Out-of-bounds" not in str(error):  # how the interpreter refuses an address
                raise
            found.add("out of bounds")
        else:
            found |= {name for name, value in vars(result).items() if value}
        if found & enough:
            break
    forget_compiled()
    return found


def is_found(name: str, rows: list[Row], spec: AttentionSpec = SPEC) -> bool:
    return name in findings(rows, spec, enough={name})


def test_no_fault_no_findings() -> None:
    assert findings(DECODES + CHUNKS) == findings(EVEN_TURNS) == set()


def test_waits_for_less_than_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "wait_words", lambda block, num_words, sem: wait_words(block, num_words - 1, sem))
    assert is_found("semaphores", DECODES + CHUNKS)


def test_the_other_half_s_semaphore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every count is right in the end: only what was read too early can tell, and only where copies come late."""

    def signal_the_other(pages: Any, page_of: Any, begin: Any, end: Any, block: Any, sem: Any) -> None:
        half = sem.transforms[-1].indices[0]
        fetch(pages, page_of, begin, end, block, sem.ref.at[1 - half])

    monkeypatch.setattr(paging, "fetch", signal_the_other)
    found = findings(EVEN_TURNS)
    assert "semaphores" not in found
    assert "not_finite" in found


def test_attention_before_the_append_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append.Appender, "wait", lambda *args: None)
    found = findings(CHUNKS)
    assert "semaphores" in found
    assert found & {"races", "error", "not_finite", "wrong_tokens"}


def test_a_tile_without_the_outputs_of_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that meet in a tile of tokens: what the first one left there is not merged."""
    block_at = entries.query_block_at

    def without_skip(*args: Any) -> Any:
        return replace(block_at(*args), skip=jnp.int32(0))

    monkeypatch.setattr(entries, "query_block_at", without_skip)
    assert is_found("error", DECODES + CHUNKS)


def test_a_shared_word_that_loses_its_older_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append.Appender, "_if_shared", lambda *args: None)
    assert is_found("wrong_tokens", CHUNKS)


@pytest.mark.parametrize("rows", [DECODES, CHUNKS], ids=["decodes", "chunks"])
def test_a_shared_word_of_int8_that_keeps_another_number_of_older_tokens(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two, whatever the position. 299 cached tokens, 149, and 211 leave three, one and three in the word."""
    monkeypatch.setattr(paging, "older_tokens", lambda position, packing: jnp.uint32(0xFFFF))
    assert is_found("wrong_tokens", rows, replace(SPEC, kv_dtype=jnp.int8, page_size=32))


def test_a_write_back_beyond_the_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word behind them belongs to nobody yet: writing it is movement that nobody asked for."""
    for_each_run = paging.Pages.for_each_run

    def one_further(self: Any, begin: Any, end: Any, body: Any) -> None:
        for_each_run(self, begin + 1, end + 1, body)

    def append_shifted(*args: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(paging.Pages, "for_each_run", one_further)
            write(*args)

    monkeypatch.setattr(append.Appender, "write", append_shifted)
    assert is_found("foreign_words", CHUNKS)


def test_the_mask_of_no_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles.Tiles, "mask", lambda self, q_tile, kv_tile: 0)
    assert is_found("error", CHUNKS)


WRONG = {"error", "not_finite"}


def test_a_row_of_spec_decode_without_its_second_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_decode, "_num_chunks", lambda block, blocks: 1)
    assert findings(DRAFTS, enough=WRONG, few=True) & WRONG


def test_masks_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of few queries behind one of many, whose masks it takes: their phase is the same."""
    case = make_case(
        replace(SPEC, num_query_heads=8),
        [Row(query_len=96, kv_len=96), Row(query_len=32, kv_len=96)],
        num_tokens=128,
        num_rows=2,
        pages_per_seq=6,
    )
    monkeypatch.setattr(tiles.MixedBlocks, "mask_key", lambda self, g: 0)
    forget_compiled()
    result = run(case, tile_queries=128)
    forget_compiled()
    assert result.error or result.not_finite
