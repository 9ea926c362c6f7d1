"""The kernel that JAX ships for TPUs, interpreted on the CPU: by itself, in the self-test, and as a server's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from batcher.request import Request, SamplingParams
from pallas_kernels.api import PagedAttention, candidates
from pallas_kernels.self_test import Program, SelfTest
from pallas_kernels.spec import AttentionSpec, Backend
from scripts.building.attention_backend import Backends, paged_attention
from scripts.building.runner import build_runner, warm_engine
from scripts.flags.settings import EngineSettings
from scripts.lab.accounts.specs import make_spec
from scripts.lab.serve_all import serve_all
from tests.demo.one_layer import first_layers
from tests.pallas_kernels.dense import Case, Row, make_case
from tests.pallas_kernels.tpu import interpreted
from tests.scripts.faulty_backends import NoNumbers

PROGRAMS = [
    Program(num_tokens=48, num_rows=3),
    Program(num_tokens=3, num_rows=3),
    Program(num_tokens=12, num_rows=3, spec_decode=True),
]
FORMS = {
    "1b, one chip of four": make_spec((8, 2, 64), page_size=64),
    "8b": make_spec((32, 8, 128), page_size=16),
    "8b, int8": make_spec((32, 8, 128), page_size=32, kv_dtype="int8"),
    "groups of 3, head_dim 96": make_spec((6, 2, 96), page_size=48),
    "one KV head": make_spec((4, 1, 128), page_size=16),
    "float32, head_dim 48": make_spec((4, 2, 48), page_size=16, dtype=jnp.float32),
    "float32, fp8": make_spec((8, 4, 64), page_size=16, dtype=jnp.float32, kv_dtype="float8_e4m3fn"),
}


@pytest.fixture(autouse=True)
def jaxs_kernel() -> Iterator[None]:
    with interpreted.jaxs_kernel():
        yield


def filled_pages(attention: PagedAttention, case: Case, first_page: int, *, with_step: bool) -> np.ndarray:
    """The pages that hold the rows' tokens, with NaN (in int8 the lowest number) everywhere else."""
    like = attention.kv_pages(case.num_pages + first_page)
    worst = jnp.iinfo(like.dtype).min if like.dtype == jnp.int8 else np.nan
    pages = np.full(like.shape, worst, like.dtype)
    for row in range(len(case.rows)):
        for position, pair in enumerate(zip(*case.in_pages(row, with_step=with_step), strict=True)):
            page = np.asarray(case.batch.page_table)[row, position // case.spec.page_size] + first_page
            for kind, heads in enumerate(pair):
                stored = pages[page, position % case.spec.page_size, kind::2]
                stored[:], stored[:, : case.spec.head_dim] = 0, heads
    return pages


def step(case: Case, first_page: int = 0, *, decode_only: bool = False) -> tuple[np.ndarray, ...]:
    """The output, the pages, and the pages as they should be. Padding is NaN."""
    attention = PagedAttention(case.spec, Backend.TPU_JAX)
    for x in (case.queries, case.keys, case.values):
        x[case.num_real_tokens :] = np.nan
    before, expected = (filled_pages(attention, case, first_page, with_step=new) for new in (False, True))

    @jax.jit
    def run(batch: Any, *operands: Any) -> Any:
        metadata = attention.make_metadata(batch, num_tokens=case.num_tokens, decode_only=decode_only)
        return attention(*operands[:4], metadata, first_page, *operands[4:])

    out, after = run(case.batch, case.queries, case.keys, case.values, before, *case.scales)
    return tuple(np.asarray(x).astype(np.float32) for x in (out, after, expected))


@pytest.mark.parametrize("name", FORMS)
def test_as_dense_attention_over_random_batches(name: str) -> None:
    spec, rng = FORMS[name], np.random.default_rng(len(name))
    for seed in range(2):
        lengths = [(1, int(n)) for n in rng.integers(1, 150, 3)]
        lengths += [
            (int(q), int(q + past)) for q, past in zip(rng.integers(2, 40, 2), rng.integers(0, 90, 2), strict=True)
        ]
        rows = [Row(query_len=q, kv_len=n) for q, n in lengths]
        case = make_case(spec, rows, num_tokens=96, num_rows=8, pages_per_seq=10, num_pages=60, seed=seed)
        out, after, expected = step(case, first_page=5)
        tolerance = 2e-5 if spec.dtype == jnp.float32 else 0.03
        np.testing.assert_allclose(out[: case.num_real_tokens], case.expected(), rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(out[case.num_real_tokens :], 0)
        np.testing.assert_array_equal(after, expected)


def test_a_step_without_rows_reads_what_it_waits_for_and_writes_nothing() -> None:
    case = make_case(FORMS["8b"], [], num_tokens=8, num_rows=8, pages_per_seq=3)
    attention = PagedAttention(case.spec, Backend.TPU_JAX)
    batch = attention.make_metadata(case.batch, num_tokens=8, decode_only=True).batch
    assert (int(batch.num_rows), batch.query_starts.tolist(), batch.kv_lens.tolist()) == (1, [0] + 8 * [1], 8 * [1])
    out, after, expected = step(case, decode_only=True)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(after, expected)


def test_the_self_test_passes() -> None:
    attention = PagedAttention(FORMS["8b, int8"], Backend.TPU_JAX)
    passed = SelfTest(attention, pages_per_seq=8, longest=250, first_page=11).run(PROGRAMS, repeat=True)
    assert passed.num_steps == 8
    assert 0 < passed.largest_error < 0.015


def test_heads_may_be_split_over_chips() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    attention = PagedAttention(make_spec((8, 4, 64), page_size=16), Backend.TPU_JAX, mesh)
    pages = attention.kv_pages(10)
    assert (pages.shape, attention.page_bytes()) == ((10, 16, 8, 128), 16 * 4 * 128 * 2)
    assert pages.sharding.shard_shape(pages.shape) == (10, 16, 4, 128)
    assert SelfTest(attention, pages_per_seq=8, longest=100).run(PROGRAMS).num_steps == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 160}, "head_dim up to 128: spec.head_dim=160"),
        ({"page_size": 4}, "pages of 8 to 512 tokens: spec.page_size=4"),
        ({"page_size": 1024}, "pages of 8 to 512 tokens: spec.page_size=1024"),
        ({"dtype": jnp.float16, "kv_dtype": jnp.float16}, "bfloat16 or float32: spec.dtype"),
        ({"num_kv_heads": 3, "num_query_heads": 6}, "spec.num_kv_heads=3"),
        ({"num_kv_heads": 1, "kv_dtype": jnp.dtype("int8")}, "spec.num_kv_heads=1 spec.kv_dtype=dtype.'int8'"),
        ({"num_kv_heads": 1, "num_query_heads": 256}, "up to 128 query heads in a block, not 256"),
    ],
)
def test_what_it_does_not_take_is_refused_in_words(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedAttention(replace(FORMS["8b"], **changes), Backend.TPU_JAX)


def test_it_cannot_be_asked_for_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="backend 'tpu-jax' cannot run on platform='cpu'; use 'auto'"):
        candidates("tpu-jax", "cpu")


@pytest.mark.slow
def test_the_demo_says_the_same_as_over_the_reference(tmp_path: Path) -> None:
    """Where the project's own kernels are wrong; the next candidate is this one, and then the reference."""
    limits = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 16, "num_pages": 9}
    settings = EngineSettings(
        model=str(first_layers(tmp_path / "demo", 2)), device="cpu", dtype="float32", kv_cache_dtype="int8",
        compile_cache="none", **limits,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    requests = [Request(request_id=str(n), prompt=tuple(range(9, 9 + n)), sampling=sampling) for n in (3, 21)]

    def serve(wrong: tuple[Backend, ...]) -> tuple[Any, list[tuple[int, ...]]]:
        built = build_runner(settings, lambda line: None, backends=faulty(wrong))
        return built.info.attention, serve_all(warm_engine(built, lambda line: None), requests).tokens

    info, tokens = serve((Backend.TPU,))
    assert (info.backend, info.self_test, list(info.failures)) == ("tpu-jax", "passed", ["tpu"])
    assert "is wrong: not a number" in info.failures["tpu"]
    info, expected = serve((Backend.TPU, Backend.TPU_JAX))
    assert (info.backend, list(info.failures)) == ("reference", ["tpu", "tpu-jax"])
    assert all("is wrong: not a number" in failure for failure in info.failures.values())
    assert [len(each) for each in tokens] == [12, 12]
    assert tokens == expected


class Wrong(NoNumbers):
    @property
    def takes_projection(self) -> bool:
        return False


def faulty(wrong: tuple[Backend, ...]) -> Backends:
    """The candidates of a TPU, in their order, with these wrong."""

    def make(config: Any, backend: Backend, **options: Any) -> PagedAttention:
        if backend in wrong:
            spec: AttentionSpec = paged_attention(config, Backend.REFERENCE, **options).spec
            return Wrong(spec, backend)
        return paged_attention(config, backend, **options)

    return Backends(candidates=lambda requested, _: candidates(requested, "tpu"), make=make)
