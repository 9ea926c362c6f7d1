"""The self-test finds faults of the TPU kernels by their numbers alone, as it must on a chip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.api import PagedAttention
from pallas_kernels.self_test import Program, SelfTest, SelfTestError
from pallas_kernels.spec import AttentionSpec, Backend
from pallas_kernels.tpu import paging, tiles

MIXED, DECODE = Program(num_tokens=16, num_rows=2), Program(num_tokens=2, num_rows=2)
DRAFTS = Program(num_tokens=8, num_rows=2, spec_decode=True)


def outcome(program: Program, kv_dtype: str = "bfloat16") -> str:
    jax.clear_caches()  # a fault is patched in while the kernels are traced
    spec = AttentionSpec(
        num_query_heads=4, num_kv_heads=2, head_dim=128, page_size=32, dtype=jnp.bfloat16, kv_dtype=jnp.dtype(kv_dtype)
    )
    try:
        SelfTest(PagedAttention(spec, Backend.TPU_INTERPRET), pages_per_seq=3).run([program])
    except SelfTestError as error:
        return str(error)
    finally:
        jax.clear_caches()
    return ""


@pytest.mark.parametrize(
    ("program", "kv_dtype"), [(MIXED, "bfloat16"), (MIXED, "int8"), (DECODE, "bfloat16"), (DRAFTS, "int8")]
)
def test_the_kernels_pass(program, kv_dtype):
    assert outcome(program, kv_dtype) == ""


def test_a_missing_wait_is_found(monkeypatch):
    monkeypatch.setattr(paging, "wait_words", lambda *_: None)
    assert outcome(DECODE).startswith("decode of 2 rows: a single token over")


def test_a_missing_mask_is_found(monkeypatch):
    monkeypatch.setattr(tiles.Tiles, "mask", lambda self, q_tile, kv_tile: 0)
    assert outcome(MIXED).startswith("mixed step of 16 tokens in 2 rows: a chunk of")


def test_older_tokens_of_a_shared_word_that_are_lost_are_found(monkeypatch):
    monkeypatch.setattr(paging, "older_tokens", lambda position, packing: jnp.uint32(0))
    assert "is wrong" in outcome(MIXED, "int8")
