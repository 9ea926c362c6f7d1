"""The TPU kernels, interpreted on the CPU, against dense attention: what is interpreted here is what compiles there."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import AttentionSpec, Backend, RaggedBatch
from tests.pallas_kernels.dense import Row, make_case
from tests.pallas_kernels.tpu.interpreted import DMA_MODES, filled_pages, run


def spec(**changes) -> AttentionSpec:
    fields = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "dtype": jnp.bfloat16}
    fields |= changes
    return AttentionSpec(**{"kv_dtype": fields["dtype"]} | fields)


def int8(**changes) -> AttentionSpec:
    return spec(kv_dtype=jnp.int8, page_size=32, **changes)


def rows(*lengths: tuple[int, int]) -> list[Row]:
    return [Row(query_len=q, kv_len=kv) for q, kv in lengths]


# kv_len 1; a word's first and second token; a page's and a block's last and first; several blocks
DECODES = rows((1, 1), (1, 2), (1, 16), (1, 17), (1, 128), (1, 129), (1, 290))
# a whole prompt; q_len over a page and over a query block; a chunk that begins in the middle of a word; one token more
CHUNKS = rows((1, 33), (70, 70), (7, 50), (3, 260), (1, 18), (2, 2))
# The padding of a step has finite numbers or NaN. No row's output depends on it.
PADDED = pytest.mark.parametrize(
    ("dma_mode", "poison_padding"),
    [*((mode, False) for mode in DMA_MODES), ("on_wait", True)],
    ids=[*DMA_MODES, "padding of no number"],
)


@PADDED
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("lengths", "num_tokens"), [(DECODES, 8), (CHUNKS, 96)], ids=["decodes", "chunks"])
def test_pages(lengths: list[Row], num_tokens: int, head_dim: int, dma_mode: str, poison_padding: bool) -> None:
    case = make_case(spec(head_dim=head_dim), lengths, num_tokens=num_tokens, num_rows=8, pages_per_seq=20)
    assert run(case, dma_mode, decode_only=num_tokens == 8, poison_padding=poison_padding).clean


@pytest.mark.parametrize(
    ("num_query_heads", "num_kv_heads", "head_dim", "dma_mode"),
    [(3, 1, 128, "on_wait"), (8, 4, 64, "on_wait"), (12, 2, 64, "eager")],
)
def test_a_projection_is_rotated_and_split(
    num_query_heads: int, num_kv_heads: int, head_dim: int, dma_mode: str
) -> None:
    heads = spec(num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    case = make_case(heads, CHUNKS, num_tokens=96, num_rows=8, pages_per_seq=20)
    assert run(case, dma_mode, projected=True, poison_padding=True).clean


def test_a_projection_of_float32_in_a_decode() -> None:
    case = make_case(spec(dtype=jnp.float32), DECODES, num_tokens=8, num_rows=8, pages_per_seq=20)
    assert run(case, projected=True, decode_only=True).clean


@pytest.mark.parametrize("longest", [256, 257, 600])
def test_decodes_of_short_and_of_long_contexts(longest: int) -> None:
    """Blocks of 256 tokens, or of as many as the longest sequence may have."""
    lengths, shape = rows((1, 40), (1, longest), (1, 3)), {"num_tokens": 8, "num_rows": 8, "pages_per_seq": 40}
    case = make_case(spec(), lengths, **shape, num_pages=46)
    assert run(case, decode_only=True, choose_blocks=True).clean


# rows with drafts: a block of queries holds tokens of the rows next to it, too, and a row takes one chunk or several
DRAFTS = rows((1, 40), (4, 300), (5, 5), (4, 129), (8, 260), (16, 290), (3, 515), (2, 600))


@pytest.mark.parametrize("dma_mode", DMA_MODES)
@pytest.mark.parametrize(("make_spec", "num_rows"), [(spec, 16), (int8, 8)], ids=["4 slots", "8 slots of int8"])
def test_rows_of_spec_decode(make_spec: Callable[..., AttentionSpec], num_rows: int, dma_mode: str) -> None:
    case = make_case(make_spec(num_query_heads=8), DRAFTS, num_tokens=48, num_rows=num_rows, pages_per_seq=40)
    assert run(case, dma_mode, spec_decode=True, poison_padding=True).clean


@pytest.mark.parametrize(("num_query_heads", "num_kv_heads", "head_dim"), [(8, 4, 64), (3, 3, 64)])
def test_rows_of_spec_decode_of_a_projection(num_query_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """4 slots, and 16. Two heads in a lane block; K and V in one plane, registers that the heads do not fill."""
    heads = spec(num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    lengths, num_rows = (rows((16, 290), (3, 40)), 2) if num_query_heads == 3 else (DRAFTS[1:4], 12)
    case = make_case(heads, lengths, num_tokens=32, num_rows=num_rows, pages_per_seq=20)
    assert run(case, spec_decode=True, projected=num_kv_heads != 3).clean


@pytest.mark.parametrize(("num_query_heads", "tile_queries", "dma_mode"), [(8, 128, "on_wait"), (6, 256, "eager")])
def test_short_chunks_next_to_long_ones(num_query_heads: int, tile_queries: int, dma_mode: str) -> None:
    """Blocks of up to 64 queries of 4 heads take narrow tiles of two planes, 128 of 3 heads; their masks differ."""
    lengths = rows((1, 40), (70, 290), (7, 150), (140, 150))
    case = make_case(spec(num_query_heads=num_query_heads), lengths, num_tokens=224, num_rows=4, pages_per_seq=20)
    assert run(case, dma_mode, tile_queries=tile_queries, poison_padding=True).clean


# Of a word's four tokens each is once the last cached one, or the first new one.
INT8_DECODES = rows((1, 1), (1, 2), (1, 3), (1, 4), (1, 33), (1, 128), (1, 131), (1, 290))
INT8_CHUNKS = rows((1, 34), (70, 70), (7, 50), (3, 258), (2, 9), (2, 2), (5, 40), (4, 6))


@pytest.mark.parametrize("dma_mode", DMA_MODES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("lengths", "num_tokens"), [(INT8_DECODES, 8), (INT8_CHUNKS, 96)], ids=["decodes", "chunks"])
def test_pages_of_int8(lengths: list[Row], num_tokens: int, head_dim: int, dma_mode: str) -> None:
    case = make_case(int8(head_dim=head_dim), lengths, num_tokens=num_tokens, num_rows=8, pages_per_seq=10)
    assert run(case, dma_mode, decode_only=num_tokens == 8, projected=True).clean


@pytest.mark.parametrize("kind", [0, 1], ids=["keys", "values"])
def test_a_scale_that_is_no_number_spoils_its_own_head_only(kind: int) -> None:
    heads = int8(num_query_heads=4, num_kv_heads=2, dtype=jnp.float32)
    case = make_case(heads, rows((1, 40), (19, 70)), num_tokens=24, num_rows=4, pages_per_seq=3)
    clean = case.expected()[:, :2]
    pages = jnp.asarray(filled_pages(case, 0))
    case.kv_scales[kind, 1] = np.nan
    attention = PagedAttention(heads, Backend.TPU_INTERPRET)
    metadata = attention.make_metadata(case.batch, num_tokens=case.num_tokens, decode_only=False)
    operands = (jnp.asarray(x) for x in (case.queries, case.keys, case.values))
    out, _ = attention(*operands, pages, metadata, kv_scales=jnp.asarray(case.kv_scales))
    out = np.asarray(out, np.float64)[: case.num_real_tokens]
    assert np.abs(out[:, :2] - clean).max() < 2e-5
    assert np.isnan(out[:, 2:]).all()


def test_what_pads_a_step_of_int8_reaches_nobody_and_blocks_are_chosen() -> None:
    case = make_case(int8(), INT8_CHUNKS, num_tokens=96, num_rows=8, pages_per_seq=10)
    assert run(case, poison_padding=True, choose_blocks=True, first_page=7).clean


HEADS = [(3, 1, 128), (8, 8, 128), (6, 3, 64), (32, 8, 64), (1, 1, 128), (8, 1, 128), (4, 1, 64), (3, 3, 64)]


@pytest.mark.parametrize(
    ("make_spec", "heads"), [*((spec, n) for n in HEADS), (int8, (3, 1, 128)), (int8, (32, 8, 64))]
)
def test_head_counts(make_spec: Callable[..., AttentionSpec], heads: tuple[int, int, int]) -> None:
    num_query_heads, num_kv_heads, head_dim = heads
    kind = make_spec(num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    case = make_case(kind, rows((1, 35), (1, 2), (19, 24)), num_tokens=24, num_rows=4, pages_per_seq=3)
    assert run(case).clean


def test_pages_of_256_tokens() -> None:
    case = make_case(spec(page_size=256), rows((1, 257), (40, 280), (9, 9)), num_tokens=64, num_rows=4, pages_per_seq=2)
    assert run(case).clean


@pytest.mark.parametrize(("make_spec", "head_dim"), [(spec, 64), (int8, 128)])
def test_float32(make_spec: Callable[..., AttentionSpec], head_dim: int) -> None:
    exact = make_spec(dtype=jnp.float32, head_dim=head_dim)
    case = make_case(exact, rows((1, 1), (1, 150), (33, 150), (5, 5)), num_tokens=48, num_rows=4, pages_per_seq=10)
    assert run(case).clean


@pytest.mark.parametrize(
    ("lengths", "first_page", "dma_mode"),
    [
        ([], 0, "on_wait"),
        (rows((1, 20)), 0, "eager"),
        (rows((5, 20)), 0, "on_wait"),
        (rows((1, 20), (5, 20)), 7, "eager"),
    ],
    ids=["no rows", "decodes only", "chunks only", "a later layer"],
)
def test_empty_ranges_and_pages_of_a_later_layer(lengths: list[Row], first_page: int, dma_mode: str) -> None:
    shape = {"num_tokens": 8, "num_rows": 4, "pages_per_seq": 2, "num_pages": 13 - first_page}
    assert run(make_case(spec(), lengths, **shape), dma_mode, first_page=first_page).clean


def test_chosen_block_sizes_of_six_queries_a_plane() -> None:
    heads, lengths = spec(num_query_heads=6, head_dim=64), rows((1, 200), (40, 200))
    case = make_case(heads, lengths, num_tokens=48, num_rows=4, pages_per_seq=13)
    assert run(case, choose_blocks=True).clean


@pytest.mark.parametrize(("head_dim", "make_spec"), [(64, spec), (128, int8)])
def test_sharded_by_kv_head(head_dim: int, make_spec: Callable[..., AttentionSpec]) -> None:
    """Two chips, half of the KV heads and of their scales each, through the public operation."""
    heads = make_spec(num_query_heads=8, num_kv_heads=4, head_dim=head_dim)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    attention = PagedAttention(heads, Backend.TPU_INTERPRET, mesh)
    case = make_case(heads, rows((1, 1), (19, 19)), num_tokens=24, num_rows=4, pages_per_seq=2)
    pages = attention.kv_pages(case.num_pages)

    @jax.jit
    def step(batch: RaggedBatch, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        metadata = attention.make_metadata(batch, num_tokens=case.num_tokens, decode_only=False)
        return attention(*operands[:4], metadata, 0, *operands[4:])

    empty = jnp.zeros(pages.shape, pages.dtype, device=pages.sharding)
    out, after = step(case.batch, case.queries, case.keys, case.values, empty, *case.scales)
    assert np.abs(np.asarray(out, np.float64)[: case.num_real_tokens] - case.expected()).max() < 0.03
    assert after.sharding.shard_shape(after.shape)[1] == pages.shape[1] // 2


LENGTH = st.one_of(st.integers(1, 300), st.sampled_from([1, 15, 16, 17, 127, 128, 129, 255, 256, 257]))


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Decodes first, then chunks that fit 96 tokens in 6 rows."""
    decodes = [Row(query_len=1, kv_len=draw(LENGTH)) for _ in range(draw(st.integers(0, 4)))]
    chunks, budget = [], 90
    for _ in range(draw(st.integers(0, 6 - len(decodes)))):
        query_len = draw(st.integers(2, max(2, budget - 10)))
        budget -= query_len
        if budget < 0:
            break
        chunks.append(Row(query_len=query_len, kv_len=query_len + draw(st.integers(0, 300 - query_len))))
    return decodes + chunks


@pytest.mark.parametrize(("heads", "dma_mode"), [((12, 3, 64), "on_wait"), ((8, 8, 128), "eager")])
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(lengths=batches(), seed=st.integers(0, 2**31))
def test_random_batches(lengths: list[Row], seed: int, heads: tuple[int, int, int], dma_mode: str) -> None:
    kind = spec(num_query_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2])
    case = make_case(kind, lengths, num_tokens=96, num_rows=6, pages_per_seq=19, num_pages=116, seed=seed)
    assert run(case, dma_mode).clean
