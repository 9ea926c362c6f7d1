"""The C code against dense attention in float64, on this CPU's vectors and on narrower ones."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.api import PagedAttention
from pallas_kernels.cpu.attention import PIECE
from pallas_kernels.errors import UnavailableError
from pallas_kernels.spec import AttentionSpec, Backend, RaggedBatch
from tests.pallas_kernels.dense import Case, Row, make_case
from tests.pallas_kernels.test_reference import ragged_rows

ROWS, TOKENS, PAGES_PER_SEQ = 6, 160, 20
KINDS = {"float32": ("float32", 2e-5), "bfloat16": ("bfloat16", 2e-2), "int8": ("float32", 2e-5)}


def spec(kind: str = "float32", **changes) -> AttentionSpec:
    dtype = jnp.dtype(KINDS[kind][0])
    fields = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 32, "page_size": 32, "dtype": dtype}
    return AttentionSpec(**fields | {"kv_dtype": jnp.dtype(kind)} | changes)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs_of_other_targets(target):
    compiled_step.cache_clear()


@cache
def compiled_step(spec: AttentionSpec, first_page: int = 0, mesh: jax.sharding.Mesh | None = None):
    attention = PagedAttention(spec, Backend.CPU, mesh)

    def step(
        batch: RaggedBatch, queries: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array, *scales: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        metadata = attention.make_metadata(batch, num_tokens=queries.shape[0], decode_only=False)
        return attention(queries, keys, values, pages, metadata, first_page, *scales)

    return jax.jit(step, donate_argnums=4)


def filled_pages(case: Case, *, first_page: int = 0, with_step: bool = False) -> np.ndarray:
    """The history of every row in its pages, NaN everywhere else (in int8, which has none, the lowest number)."""
    like = PagedAttention(case.spec, Backend.CPU).kv_pages(case.num_pages + first_page)
    _, num_pages, heads, page_size, head_dim = like.shape
    poison = -128 if like.dtype == jnp.int8 else np.nan
    keys = np.full((num_pages, heads, page_size // PIECE, head_dim, PIECE), poison, like.dtype)
    values = np.full((num_pages, heads, page_size, head_dim), poison, like.dtype)
    table = np.asarray(case.batch.page_table)
    for row in range(len(case.rows)):
        for position, (key, value) in enumerate(zip(*case.in_pages(row, with_step=with_step), strict=True)):
            page, at = table[row, position // page_size] + first_page, position % page_size
            keys[page, :, at // PIECE, :, at % PIECE] = key
            values[page, :, at] = value
    return np.stack([keys.reshape(values.shape), values])


def run(case: Case, first_page: int = 0) -> tuple[np.ndarray, np.ndarray]:
    pages = jnp.asarray(filled_pages(case, first_page=first_page))
    step = compiled_step(case.spec, first_page)
    out, pages = step(case.batch, case.queries, case.keys, case.values, pages, *case.scales)
    return np.asarray(out), np.asarray(pages)


def check(case: Case, kind: str, first_page: int = 0) -> None:
    out, pages = run(case, first_page)
    real = case.num_real_tokens
    tolerance = KINDS[kind][1]
    np.testing.assert_allclose(out[:real].astype(np.float64), case.expected(), atol=tolerance, rtol=0)
    assert (out[real:] == 0).all()
    wanted = filled_pages(case, first_page=first_page, with_step=True)
    np.testing.assert_array_equal(pages.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(rows=ragged_rows(), seed=st.integers(0, 1000))
def test_random_ragged_batches_equal_dense_attention(kind, rows, seed):
    shape = {"num_tokens": TOKENS, "num_rows": ROWS, "pages_per_seq": PAGES_PER_SEQ}
    check(make_case(spec(kind), rows, **shape, num_pages=1 + ROWS * PAGES_PER_SEQ, seed=seed), kind)


HEADS, PAGES = [(1, 1), (8, 1), (6, 2), (64, 1)], [(16, 16), (48, 80), (256, 128), (64, 256)]


@pytest.mark.parametrize(
    ("kind", "heads", "page_size", "head_dim"),
    [(kind, HEADS[i - turn], *pages) for turn, kind in enumerate(KINDS) for i, pages in enumerate(PAGES)],
)
def test_heads_and_pages(kind, heads, page_size, head_dim):
    rows = [Row(query_len=1, kv_len=1), Row(query_len=1, kv_len=page_size + 1), Row(query_len=21, kv_len=90)]
    changed = spec(kind, num_query_heads=heads[0], num_kv_heads=heads[1], page_size=page_size, head_dim=head_dim)
    check(make_case(changed, rows, num_tokens=24, num_rows=4, pages_per_seq=8), kind)


def test_pages_after_those_of_other_layers():
    rows = [Row(query_len=1, kv_len=40), Row(query_len=9, kv_len=9)]
    check(make_case(spec(), rows, num_tokens=16, num_rows=2, pages_per_seq=4), "float32", first_page=7)


# Whole vectors of sums that are in registers at once, and a rest.
@pytest.mark.parametrize(
    ("kind", "head_dim"), [("float32", 32), ("float32", 48), ("float32", 80), ("bfloat16", 48), ("int8", 80)]
)
def test_the_bits_of_a_query_depend_on_its_own_row_only(kind, head_dim):
    """The queries of one chunk, in smaller chunks and among other rows."""
    of, one = spec(kind, num_query_heads=6, head_dim=head_dim), [Row(query_len=70, kv_len=200)]
    whole = make_case(of, one, num_tokens=96, num_rows=2, pages_per_seq=8, seed=3)
    expected, _ = run(whole)
    for count, company in ((1, 0), (1, 5), (7, 2), (30, 1)):
        for first in (0, 40 - count, 70 - count):
            own = Row(query_len=count, kv_len=130 + first + count)
            rows = [*(Row(query_len=1, kv_len=30 + i) for i in range(company)), own]
            case = make_case(of, rows, num_tokens=40, num_rows=8, pages_per_seq=8, seed=9)
            past = [np.concatenate([old, new[:first]]) for old, new in zip(*history_and_step(whole), strict=True)]
            case.history[company] = tuple(past)
            if case.kv_scales is not None:
                case.kv_scales[:] = whole.kv_scales
            for mine, theirs in ((case.queries, whole.queries), (case.keys, whole.keys), (case.values, whole.values)):
                mine[company : company + count] = theirs[first : first + count]
            out, _ = run(case)
            np.testing.assert_array_equal(out[company : company + count], expected[first : first + count])


def history_and_step(case: Case) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Keys and values of the first row before the step, and those of the step."""
    return case.history[0], (case.keys, case.values)


def test_a_step_over_two_devices_equals_one_on_one():
    rows = [Row(query_len=1, kv_len=77), Row(query_len=30, kv_len=50)]
    case = make_case(spec(), rows, num_tokens=32, num_rows=4, pages_per_seq=4)
    out, pages = run(case)
    mesh = jax.make_mesh((2,), ("tensor",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    like = PagedAttention(case.spec, Backend.CPU, mesh).kv_pages(case.num_pages)
    step = compiled_step(case.spec, 0, mesh)
    split = step(case.batch, case.queries, case.keys, case.values, jax.device_put(filled_pages(case), like.sharding))
    np.testing.assert_array_equal(out, split[0])
    np.testing.assert_array_equal(pages, split[1])


def test_pages_are_updated_in_place():
    case = make_case(spec(), [Row(query_len=1, kv_len=77)], num_tokens=1, num_rows=1, pages_per_seq=4)
    pages = jax.device_put(jnp.asarray(filled_pages(case)), jax.devices()[0])
    at = pages.unsafe_buffer_pointer()
    _, after = compiled_step(case.spec)(case.batch, case.queries, case.keys, case.values, pages)
    assert after.unsafe_buffer_pointer() == at


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_table", 99, "a page that does not exist"),
        ("page_table", -1, "a page that does not exist"),
        ("kv_lens", 1000, "longer than its page table"),
        ("kv_lens", 2, "more queries than tokens"),
        ("query_starts", 40, "not in order, or too large"),
        ("query_starts", -1, "not in order, or too large"),
        ("num_rows", 5, "num_rows is not within the rows"),
    ],
)
def test_what_would_leave_the_buffers_is_an_error(field, value, message):
    """A wrong page table ends the step with an error, and nothing is read or written outside of the pages."""
    case = make_case(spec(), [Row(query_len=9, kv_len=77)], num_tokens=16, num_rows=4, pages_per_seq=4)
    fields = {name: np.array(getattr(case.batch, name)) for name in RaggedBatch.__dataclass_fields__}
    if field == "num_rows":
        fields[field] = np.int32(value)
    else:
        fields[field].flat[1 if field == "query_starts" else 0] = value
    pages = jnp.asarray(filled_pages(case))
    step = compiled_step(case.spec)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(step(RaggedBatch(**fields), case.queries, case.keys, case.values, pages))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 8}, "16s of tokens, not 8"),
        ({"head_dim": 24}, "not 24"),
        ({"head_dim": 512}, "not 512"),
        ({"num_query_heads": 65, "num_kv_heads": 1}, "up to 64 query heads, not 65"),
        ({"dtype": jnp.dtype("float16"), "kv_dtype": jnp.dtype("float16")}, "not float16"),
        ({"kv_dtype": jnp.dtype("float8_e4m3fn")}, "not float8_e4m3fn"),
    ],
)
def test_what_the_reference_alone_computes(changes, message):
    with pytest.raises(UnavailableError, match=message):
        PagedAttention(spec(**changes), Backend.CPU)
