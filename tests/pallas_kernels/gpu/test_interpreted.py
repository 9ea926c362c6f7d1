"""The GPU kernels, interpreted with race detection, against dense attention; unused places of the pages are NaN."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gpu import attention, combine, device, tile_list
from pallas_kernels.gpu.parts import Parts
from pallas_kernels.spec import AttentionSpec
from tests.pallas_kernels.dense import Case, Row, make_case
from tests.pallas_kernels.gpu import interpreted

FP8 = jnp.float8_e4m3fn


def spec(
    heads: tuple[int, int] = (4, 1), head_dim: int = 64, page_size: int = 64, dtype=jnp.bfloat16, kv_dtype=None
) -> AttentionSpec:
    return AttentionSpec(
        num_query_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, page_size=page_size, dtype=dtype,
        kv_dtype=kv_dtype or dtype,
    )  # fmt: skip


def decodes(*kv_lens: int) -> list[Row]:
    return [Row(query_len=1, kv_len=kv_len) for kv_len in kv_lens]


@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"),
    [((8, 2), 128, 64), ((2, 2), 64, 16), ((6, 2), 64, 32), ((8, 1), 128, 128), ((16, 1), 64, 16)],
)
def test_decode_with_splits_and_padding_rows(heads, head_dim, page_size):
    case = make_case(
        spec(heads, head_dim, page_size),
        decodes(1, 300, 65),
        num_tokens=4,
        num_rows=4,
        pages_per_seq=-(-300 // page_size),
    )
    assert interpreted.run(case, decode_only=True) == interpreted.Findings()


@pytest.mark.parametrize(
    ("heads", "kv_lens", "rounds"), [((4, 4), (500, 130), 3), ((6, 6), (500, 64, 0), 6)], ids=["3 rounds", "6 rounds"]
)
def test_a_cta_takes_many_items_one_after_the_other(heads, kv_lens, rounds):
    """Items of one block to eight; the first block of each is copied during the last of the one before."""
    rows = decodes(*(kv_len for kv_len in kv_lens if kv_len))
    case = make_case(spec(heads), rows, num_tokens=len(kv_lens), num_rows=len(kv_lens), pages_per_seq=8)
    assert interpreted.decode_rounds(case, interpreted.ONE_HOPPER) == rounds
    assert interpreted.longest_decode_item(case, interpreted.ONE_HOPPER) == 8
    assert interpreted.run(case, interpreted.ONE_HOPPER, decode_only=True) == interpreted.Findings()


@pytest.mark.parametrize(
    ("gpu", "heads", "head_dim", "page_size"),
    [
        (interpreted.HOPPER, (4, 1), 128, 64),
        (interpreted.HOPPER, (16, 1), 64, 32),
        (interpreted.BLACKWELL, (3, 1), 64, 16),
        (interpreted.BLACKWELL, (8, 1), 128, 128),
    ],
)
def test_mixed_step(gpu, heads, head_dim, page_size):
    rows = [*decodes(70), Row(query_len=19, kv_len=150), Row(query_len=3, kv_len=3)]
    case = make_case(
        spec(heads, head_dim, page_size), rows, num_tokens=32, num_rows=4, pages_per_seq=-(-150 // page_size)
    )
    assert interpreted.run(case, gpu) == interpreted.Findings()


def chunks(*lens: tuple[int, int]) -> list[Row]:
    return [Row(query_len=query_len, kv_len=kv_len) for query_len, kv_len in lens]


@pytest.mark.parametrize(
    ("gpu", "heads", "rows", "num_tokens", "rounds"),
    [
        (interpreted.ONE_BLACKWELL, (8, 1), [*decodes(70, 5), *chunks((2, 150), (8, 8))], 24, 3),
        (interpreted.ONE_HOPPER, (8, 1), chunks((3, 70), (4, 4), (5, 200), (2, 2)), 24, 5),
        (interpreted.ONE_HOPPER, (12, 1), [*decodes(33), *chunks((8, 130), (5, 5))], 24, 6),
        (interpreted.ONE_BLACKWELL, (16, 1), [*decodes(200), *chunks((6, 140), (8, 20))], 32, 6),
    ],
)
def test_a_cta_takes_many_tiles_one_after_the_other(gpu, heads, rows, num_tokens, rounds):
    case = make_case(spec(heads), rows, num_tokens=num_tokens, num_rows=4, pages_per_seq=4)
    assert interpreted.prefill_rounds(case, gpu) == rounds
    assert interpreted.run(case, gpu) == interpreted.Findings()


def test_float16_and_a_later_layer_of_a_shared_pool():
    rows = [*decodes(20), Row(query_len=5, kv_len=40)]
    case = make_case(spec(dtype=jnp.float16), rows, num_tokens=16, num_rows=2, pages_per_seq=1)
    assert interpreted.run(case, interpreted.BLACKWELL, first_page=5) == interpreted.Findings()


def test_an_empty_step_is_finite_and_writes_nothing():
    case = make_case(spec(), [], num_tokens=16, num_rows=2, pages_per_seq=3)
    assert interpreted.run(case, interpreted.HOPPER) == interpreted.Findings()


BY_THREADS = {
    "bfloat16": (interpreted.AMPERE, (4, 1), 128, 64, None),
    "int8, one page a copy": (interpreted.AMPERE, (4, 1), 64, 16, jnp.int8),
    "fp8, blocks in a page": (interpreted.ADA, (8, 1), 128, 128, FP8),
    "a group in two tiles": (interpreted.ADA, (12, 1), 64, 32, None),
}


@pytest.mark.parametrize(("gpu", "heads", "head_dim", "page_size", "kv_dtype"), BY_THREADS.values(), ids=BY_THREADS)
def test_a_mixed_step_whose_threads_copy(gpu, heads, head_dim, page_size, kv_dtype):
    """With a tile of padding, and no row of padding whose table it could read instead."""
    rows = [*decodes(70, 9), *chunks((19, 300), (3, 3))]
    kind = spec(heads, head_dim, page_size, kv_dtype=kv_dtype)
    case = make_case(kind, rows, num_tokens=48, num_rows=4, pages_per_seq=-(-300 // page_size))
    assert interpreted.run(case, gpu, first_page=3) == interpreted.Findings()


@pytest.mark.parametrize(
    ("gpu", "kv_dtype"), [(interpreted.AMPERE, None), (interpreted.AMPERE, jnp.int8), (interpreted.ADA, FP8)]
)
def test_decodes_in_parts_whose_threads_copy(gpu, kv_dtype):
    rows = decodes(1, 700, 65)
    case = make_case(spec((8, 2), 128, 16, kv_dtype=kv_dtype), rows, num_tokens=4, num_rows=4, pages_per_seq=44)
    assert interpreted.metadata_of(case, gpu, decode_only=True).decode.num_merges.tolist()[0] == 1
    assert interpreted.run(case, gpu, decode_only=True) == interpreted.Findings()


def test_a_scale_that_is_no_number_spoils_its_own_head_only():
    case = make_case(
        spec((8, 2), 128, 64, kv_dtype=FP8), decodes(1, 300, 65), num_tokens=4, num_rows=4, pages_per_seq=5
    )
    clean = case.expected()[:, :4]
    case.kv_scales[0, 1] = np.nan
    output = interpreted.outputs(case, interpreted.HOPPER, decode_only=True)[0][:3].astype(np.float64)
    assert np.abs(output[:, :4] - clean).max() < interpreted.TOLERANCE
    assert np.isnan(output[:, 4:]).all()


@pytest.mark.parametrize(
    ("gpu", "heads", "head_dim", "page_size", "kv_dtype"),
    [
        (interpreted.HOPPER, (8, 2), 128, 64, FP8),
        (interpreted.ONE_HOPPER, (16, 1), 64, 32, jnp.int8),
        (interpreted.BLACKWELL, (4, 1), 64, 16, FP8),
        (interpreted.ONE_BLACKWELL, (8, 1), 128, 128, jnp.int8),
    ],
    ids=["wgmma, 8b", "wgmma, one multiprocessor", "mma, 1b", "mma, 70b/8"],
)
def test_a_mixed_step_over_pages_of_8_bits(gpu, heads, head_dim, page_size, kv_dtype):
    rows = [*decodes(70), Row(query_len=19, kv_len=300), Row(query_len=3, kv_len=3)]
    case = make_case(
        spec(heads, head_dim, page_size, kv_dtype=kv_dtype),
        rows,
        num_tokens=32,
        num_rows=4,
        pages_per_seq=-(-300 // page_size),
    )
    assert interpreted.run(case, gpu, first_page=3) == interpreted.Findings()


def test_short_chunks_on_long_contexts_are_cut_into_parts():
    """A few queries, and the tail of a prompt whose tokens are in two tiles; a short row stays whole."""
    rows = [*decodes(70), *chunks((4, 1100), (32, 1300), (3, 100))]
    case = make_case(spec((2, 1)), rows, num_tokens=40, num_rows=4, pages_per_seq=21)
    assert rows_cut(case, interpreted.BLACKWELL) == {1, 2}
    assert interpreted.run(case, interpreted.BLACKWELL) == interpreted.Findings()


def test_a_step_of_spec_decode_needs_no_decode_kernel():
    """Rows of a few queries, and of one; the longest is cut."""
    rows = [*decodes(70, 2100), *chunks((4, 2100), (3, 100))]
    case = make_case(spec((2, 1)), rows, num_tokens=16, num_rows=4, pages_per_seq=33)
    assert rows_cut(case, interpreted.HOPPER, spec_decode=True) == {1, 2}
    assert interpreted.run(case, interpreted.HOPPER, spec_decode=True) == interpreted.Findings()


def rows_cut(case: Case, gpu: device.Gpu, *, spec_decode: bool = False) -> set[int]:
    tiles = interpreted.metadata_of(case, gpu, decode_only=False, spec_decode=spec_decode).prefill.tiles
    return set(tiles[tiles[:, tile_list.TILE_PART] >= 0, tile_list.TILE_ROW].tolist())


@pytest.mark.parametrize("mine", [Row(query_len=5, kv_len=400), Row(query_len=1, kv_len=400)], ids=["chunk", "decode"])
def test_a_row_that_is_cut_has_the_same_bits_in_any_company(mine):
    """Alone, and after rows that put it at another place of the step, of the list, and of the partial results."""
    kind, found = spec((2, 1), 64, 16), []
    companies = [], [*decodes(9, 300), *(chunks((3, 300)) if mine.query_len > 1 else [])]
    for others in companies:
        case = make_case(kind, [*others, mine], **SHAPE, num_pages=NUM_PAGES)
        rng = np.random.default_rng(1)
        begin = case.num_real_tokens - mine.query_len
        for x in (case.queries, case.keys, case.values):
            x[begin : case.num_real_tokens] = rng.standard_normal(x[begin : case.num_real_tokens].shape)
        case.history[len(others)] = tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in case.history[-1])
        assert interpreted.run(case, interpreted.HOPPER, parts=CUT) == interpreted.Findings()
        output, _ = interpreted.outputs(case, interpreted.HOPPER, parts=CUT)
        found.append(output[begin : case.num_real_tokens].view(np.uint16))
    np.testing.assert_array_equal(*found)


def test_one_head_at_a_time_is_merged_to_the_same_bits(monkeypatch):
    """As where a row has many parts: a CTA each for the heads of one row, and whole groups of several rows."""
    cases = [
        make_case(spec((4, 1)), decodes(620, *others), num_tokens=4, num_rows=4, pages_per_seq=10)
        for others in ([], [300, 200, 400])
    ]
    together = [interpreted.outputs(case, interpreted.HOPPER, decode_only=True)[0] for case in cases]
    monkeypatch.setattr(combine, "MAX_TRIPS", 0)
    interpreted.compiled_step.cache_clear()
    apart = []
    for case in cases:
        assert interpreted.run(case, interpreted.HOPPER, decode_only=True) == interpreted.Findings()
        apart.append(interpreted.outputs(case, interpreted.HOPPER, decode_only=True)[0])
    interpreted.compiled_step.cache_clear()
    np.testing.assert_array_equal(np.stack(together).view(np.uint16), np.stack(apart).view(np.uint16))


# Fixed shapes: one program for all examples. Rows of more than 128 keys are cut, in up to four parts.
ROWS, TOKENS, PAGES_PER_SEQ = 4, 40, 25
SHAPE = {"num_tokens": TOKENS, "num_rows": ROWS, "pages_per_seq": PAGES_PER_SEQ}
NUM_PAGES = 1 + ROWS * PAGES_PER_SEQ
CUT = Parts(max_parts=4, min_keys=64, max_slots=512)


@st.composite
def ragged_rows(draw) -> list[Row]:
    rows = decodes(*draw(st.lists(st.integers(1, 144), max_size=3)))
    budget = TOKENS - len(rows)
    while len(rows) < ROWS and budget >= 2 and draw(st.booleans()):
        query_len = draw(st.integers(2, budget))
        budget -= query_len
        rows.append(Row(query_len=query_len, kv_len=query_len + draw(st.integers(0, 400 - query_len))))
    return rows


@pytest.mark.parametrize(
    ("gpu", "kv_dtype"),
    [(interpreted.HOPPER, None), (interpreted.HOPPER, FP8), (interpreted.BLACKWELL, None), (interpreted.ADA, FP8)],
    ids=["wgmma", "wgmma, fp8", "mma", "mma, cp.async, fp8"],
)
def test_random_ragged_batches_equal_dense_attention(gpu, kv_dtype):
    @settings(max_examples=6, database=None)
    @given(rows=ragged_rows(), seed=st.integers(0, 1000))
    def check(rows, seed):
        case = make_case(spec((2, 1), 64, 16, kv_dtype=kv_dtype), rows, **SHAPE, num_pages=NUM_PAGES, seed=seed)
        assert interpreted.run(case, gpu, parts=CUT) == interpreted.Findings()

    check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "head_dim"),
        ({"page_size": 48}, "page_size"),
        ({"dtype": jnp.float32}, "bfloat16 or float16"),
        ({"heads": (17, 1)}, "up to 16 query heads per KV head"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        attention.validate(spec(**change))


def test_fp8_is_refused_where_no_instruction_converts_it(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Gpu(arch=(8, 0), num_multiprocessors=108))
    attention.validate(spec(kv_dtype=jnp.int8))
    with pytest.raises(ValueError, match=r"no instruction that converts fp8, use int8: .* arch=\(8, 0\)"):
        attention.validate(spec(kv_dtype=FP8))
