"""The reference against dense attention in float64, over random ragged batches."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import quantised
from pallas_kernels.api import PagedAttention, candidates
from pallas_kernels.spec import AttentionSpec, Backend, RaggedBatch
from tests.pallas_kernels.dense import Case, Row, make_case

ROWS, TOKENS, PAGES_PER_SEQ = 6, 160, 20
EIGHT_BITS = [jnp.int8, jnp.float8_e4m3fn]


def spec(**changes) -> AttentionSpec:
    fields = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 16, "dtype": jnp.float32}
    fields |= changes
    return AttentionSpec(**{"kv_dtype": fields["dtype"]} | fields)


def filled_pages(case: Case, *, first_page: int = 0, extra_pages: int = 0, with_step: bool = False) -> np.ndarray:
    """The history of every row in its pages, NaN everywhere else (in int8, which has none, the lowest number)."""
    shape = PagedAttention(case.spec, Backend.REFERENCE).kv_pages(case.num_pages + extra_pages)
    pages = np.full(shape.shape, -128 if shape.dtype == jnp.int8 else np.nan, shape.dtype)
    table = np.asarray(case.batch.page_table)
    for row in range(len(case.rows)):
        keys, values = case.in_pages(row, with_step=with_step)
        for position in range(len(keys)):
            page = table[row, position // case.spec.page_size] + first_page
            pages[0, page, :, position % case.spec.page_size] = keys[position]
            pages[1, page, :, position % case.spec.page_size] = values[position]
    return pages


def run(case: Case, *, decode_only: bool = False, first_page: int = 0) -> tuple[np.ndarray, np.ndarray]:
    pages = filled_pages(case, first_page=first_page, extra_pages=first_page)
    step = compiled_step(case.spec, decode_only, first_page)
    out, pages = step(case.batch, case.queries, case.keys, case.values, pages, *case.scales)
    return np.asarray(out), np.asarray(pages)


@cache
def compiled_step(spec: AttentionSpec, decode_only: bool, first_page: int):
    attention = PagedAttention(spec, Backend.REFERENCE)

    @jax.jit
    def step(
        batch: RaggedBatch, queries: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array, *scales: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        metadata = attention.make_metadata(batch, num_tokens=queries.shape[0], decode_only=decode_only)
        return attention(queries, keys, values, pages, metadata, first_page, *scales)

    return step


def check(case: Case, tolerance: float = 2e-5, **options) -> None:
    out, _ = run(case, **options)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[: case.num_real_tokens].astype(np.float64), case.expected(), atol=tolerance, rtol=0)


@st.composite
def ragged_rows(draw, max_rows: int = ROWS, max_tokens: int = TOKENS) -> list[Row]:
    budget = max_tokens
    decodes = [Row(query_len=1, kv_len=draw(st.integers(1, 300))) for _ in range(draw(st.integers(0, max_rows)))]
    budget -= len(decodes)
    chunks = []
    for _ in range(draw(st.integers(0, max_rows - len(decodes)))):
        query_len = draw(st.integers(2, max(2, min(130, budget))))
        if query_len > budget:
            break
        budget -= query_len
        chunks.append(Row(query_len=query_len, kv_len=query_len + draw(st.integers(0, 150))))
    return decodes + chunks


@settings(max_examples=40)
@given(rows=ragged_rows(), seed=st.integers(0, 1000))
def test_random_ragged_batches_equal_dense_attention(rows, seed):
    shape = {"num_tokens": TOKENS, "num_rows": ROWS, "pages_per_seq": PAGES_PER_SEQ}
    check(make_case(spec(), rows, **shape, num_pages=1 + ROWS * PAGES_PER_SEQ, seed=seed))


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 2), (8, 8)])
@pytest.mark.parametrize("page_size", [1, 16, 48, 512])
def test_heads_and_page_sizes(heads, page_size):
    rows = [Row(query_len=1, kv_len=1), Row(query_len=1, kv_len=page_size + 1), Row(query_len=70, kv_len=90)]
    changed = spec(num_query_heads=heads[0], num_kv_heads=heads[1], page_size=page_size)
    check(make_case(changed, rows, num_tokens=80, num_rows=4, pages_per_seq=520))


def test_decode_only_program_over_several_groups():
    rows = [Row(query_len=1, kv_len=1 + 7 * i) for i in range(37)]
    check(make_case(spec(), rows, num_tokens=40, num_rows=40, pages_per_seq=20), decode_only=True)


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
@settings(max_examples=10)
@given(rows=ragged_rows(), seed=st.integers(0, 1000))
def test_random_ragged_batches_over_pages_of_8_bits(kv_dtype, rows, seed):
    shape = {"num_tokens": TOKENS, "num_rows": ROWS, "pages_per_seq": PAGES_PER_SEQ}
    changed = spec(kv_dtype=kv_dtype)
    check(make_case(changed, rows, **shape, num_pages=1 + ROWS * PAGES_PER_SEQ, seed=seed))


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_pages_of_8_bits_in_a_program_that_only_decodes_in_bfloat16(kv_dtype):
    rows = [Row(query_len=1, kv_len=1 + 7 * i) for i in range(37)]
    changed = spec(kv_dtype=kv_dtype, dtype=jnp.bfloat16, num_query_heads=6)
    check(make_case(changed, rows, num_tokens=40, num_rows=40, pages_per_seq=20), tolerance=3e-2, decode_only=True)


def test_rounding_to_8_bits_by_hand():
    """Ties to even, clipping at the largest value, and each head by its own scale."""
    heads = jnp.array([[[0.5, 1.5, 2.5, -200.0]], [[127.4, 127.6, -0.4, 0.0]]])  # [T, 1, H]
    stored = quantised.quantise(jnp.tile(heads, (1, 2, 1)), jnp.array([1.0, 2.0]), jnp.int8)
    assert stored[:, 0].tolist() == [[0, 2, 2, -127], [127, 127, 0, 0]]
    assert stored[:, 1].tolist() == [[0, 1, 1, -100], [64, 64, 0, 0]]
    eighths = quantised.quantise(jnp.array([[[1.0625, 1.1875, 460.0]]]), jnp.array([1.0]), jnp.float8_e4m3fn)
    assert eighths.astype(jnp.float32).tolist() == [[[1.0, 1.25, 448.0]]]


@pytest.mark.parametrize(("kv_dtype", "shape"), [(jnp.int8, None), (jnp.int8, (2, 3)), (jnp.float32, (2, 2))])
def test_scales_that_do_not_belong_to_the_pages_are_refused(kv_dtype, shape):
    attention = PagedAttention(spec(kv_dtype=kv_dtype), Backend.REFERENCE)
    heads = (np.zeros((8, n, 8), np.float32) for n in (4, 2, 2))
    scales = None if shape is None else np.ones(shape, np.float32)
    with pytest.raises(ValueError, match=r"8-bit K/V have scales \[2, KV heads\]"):
        attention(*heads, np.zeros(attention.kv_pages(4).shape, np.float32), None, kv_scales=scales)


@pytest.mark.parametrize("kv_dtype", [jnp.float32, *EIGHT_BITS])
def test_new_tokens_are_written_to_their_pages_and_nothing_else_is_touched(kv_dtype):
    rows = [Row(query_len=1, kv_len=17), Row(query_len=20, kv_len=40)]
    case = make_case(spec(kv_dtype=kv_dtype), rows, num_tokens=32, num_rows=4, pages_per_seq=4)
    _, after = run(case)
    wanted = filled_pages(case, with_step=True)
    np.testing.assert_array_equal(after.astype(np.float32), wanted.astype(np.float32))


def test_first_page_selects_a_layer_of_a_shared_pool():
    rows = [Row(query_len=1, kv_len=20), Row(query_len=3, kv_len=3)]
    check(make_case(spec(), rows, num_tokens=8, num_rows=2, pages_per_seq=3), first_page=5)


def test_an_empty_step_is_finite_and_writes_nothing():
    case = make_case(spec(), [], num_tokens=8, num_rows=2, pages_per_seq=3)
    out, pages = run(case)
    assert np.isfinite(out).all()
    assert np.isnan(pages).all()


def test_values_do_not_recompile():
    attention = PagedAttention(spec(), Backend.REFERENCE)
    traces = []

    @jax.jit
    def step(batch, *operands):
        traces.append(None)
        return attention(*operands, attention.make_metadata(batch, num_tokens=16, decode_only=False))

    for rows in ([Row(query_len=1, kv_len=5)], [Row(query_len=9, kv_len=30), Row(query_len=2, kv_len=2)]):
        case = make_case(spec(), rows, num_tokens=16, num_rows=4, pages_per_seq=4)
        pages = np.zeros(attention.kv_pages(12).shape, np.float32)
        step(case.batch, case.queries, case.keys, case.values, pages)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("requested", "platform", "message"),
    [
        ("cuda-magic", "cpu", "unknown attention backend 'cuda-magic'"),
        ("gpu", "cpu", "use 'gpu-interpret'"),
        (None, "rocm", "no attention backend for platform='rocm'"),
    ],
)
def test_a_backend_that_cannot_run_is_refused(requested, platform, message):
    with pytest.raises(ValueError, match=message):
        candidates(requested, platform)


def test_auto_follows_the_platform():
    assert candidates("auto", "cpu") == (Backend.CPU, Backend.REFERENCE)
    assert candidates(None, "tpu") == (Backend.TPU, Backend.TPU_JAX, Backend.REFERENCE)
    assert candidates("auto", "cuda") == (Backend.GPU, Backend.GPU_MMA, Backend.REFERENCE)
    assert candidates("tpu-interpret", "cpu") == (Backend.TPU_INTERPRET,)


@pytest.mark.parametrize(
    ("operand", "shape", "message"),
    [("queries", (8, 4, 9), "queries do not fit"), ("keys", (8, 3, 8), "keys do not fit")],
)
def test_wrong_shapes_are_refused_before_compilation(operand, shape, message):
    attention = PagedAttention(spec(), Backend.REFERENCE)
    operands = {"queries": (8, 4, 8), "keys": (8, 2, 8), "values": (8, 2, 8)} | {operand: shape}
    case = make_case(spec(), [], num_tokens=8, num_rows=2, pages_per_seq=3)
    metadata = attention.make_metadata(case.batch, num_tokens=8, decode_only=False)
    with pytest.raises(ValueError, match=message):
        attention(
            *(np.zeros(s, np.float32) for s in operands.values()),
            np.zeros(attention.kv_pages(4).shape, np.float32),
            metadata,
        )


def test_heads_that_do_not_divide_over_chips_are_refused():
    with pytest.raises(ValueError, match=r"num_shards=4"):
        spec().shard(4)
