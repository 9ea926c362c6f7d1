"""The self-test of a backend: what it runs, and the faults that it finds. Those of the kernels are in their rooms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from pallas_kernels.api import PagedAttention
from pallas_kernels.reference import NOWHERE
from pallas_kernels.self_test import Program, SelfTest, SelfTestError
from pallas_kernels.spec import AttentionSpec, Backend

MIXED, DECODE = Program(num_tokens=16, num_rows=3), Program(num_tokens=3, num_rows=3)
DRAFTS = Program(num_tokens=12, num_rows=3, spec_decode=True)


def spec(dtype="float32", kv_dtype=None, **fields):
    shape = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 8} | fields
    return AttentionSpec(**shape, dtype=jnp.dtype(dtype), kv_dtype=jnp.dtype(kv_dtype or dtype))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
def test_the_reference_passes(dtype, kv_dtype):
    attention = PagedAttention(spec(dtype, kv_dtype), Backend.REFERENCE)
    passed = SelfTest(attention, pages_per_seq=5).run([MIXED, DECODE, DRAFTS], repeat=True)
    assert passed.num_steps == 8
    assert 0 < passed.largest_error < (1e-5 if dtype == "float32" else 0.01)


def test_heads_may_be_split_over_chips():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    attention = PagedAttention(spec("bfloat16", "int8"), Backend.REFERENCE, mesh)
    assert SelfTest(attention, pages_per_seq=5).run([MIXED]).num_steps == 3


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_the_pages_may_begin_anywhere_in_the_pool(kv_dtype):
    attention = PagedAttention(spec("bfloat16", kv_dtype), Backend.REFERENCE)
    assert SelfTest(attention, pages_per_seq=5, first_page=11).run([MIXED, DECODE], repeat=True).num_steps == 5


class WrapsAround(PagedAttention):
    """Loses the upper bits of a page's offset, when it reads and writes."""

    def __call__(self, queries, keys, values, kv_pages, metadata, first_page=0, kv_scales=None):
        return super().__call__(queries, keys, values, kv_pages, metadata, first_page % 8, kv_scales)


class WritesTwice(PagedAttention):
    """Also writes to the pages of another layer."""

    def __call__(self, queries, keys, values, kv_pages, metadata, first_page=0, kv_scales=None):
        _, kv_pages = super().__call__(queries, keys, values, kv_pages, metadata, first_page - 8, kv_scales)
        return super().__call__(queries, keys, values, kv_pages, metadata, first_page, kv_scales)


@pytest.mark.parametrize("kind", [WrapsAround, WritesTwice])
def test_a_write_to_another_layer_is_found(kind):
    with pytest.raises(SelfTestError, match="a page of another layer was written to"):
        SelfTest(kind(spec(), Backend.REFERENCE), pages_per_seq=1, num_sequences=3, first_page=8).run([MIXED])


class Faulty(PagedAttention):
    """The reference, with `fault(output, pages, metadata)` applied to its results."""

    def __call__(self, *arguments, **options):
        output, pages = super().__call__(*arguments, **options)
        return type(self).fault(output, pages, arguments[4])


def of_singles(output, pages, metadata):
    single = (jnp.arange(output.shape[0]) < metadata.num_singles)[:, None, None]
    return jnp.where(single & (not metadata.decode_only), output * 1.1, output), pages


def of_decodes(output, pages, metadata):
    return output * (0.9 if metadata.decode_only else 1.0), pages


def of_one_value(output, pages, metadata):
    return output.at[0, 1, 2].add(0.1), pages


def of_padding(output, pages, metadata):
    return jnp.where((metadata.token_page == NOWHERE)[:, None, None], jnp.inf, output), pages


def of_pages(output, pages, metadata):
    return output, pages.at[0, 0].set(0)


def of_tokens_in_pages(output, pages, metadata):
    return output, jnp.where(jnp.isnan(pages), pages, 0)


@pytest.mark.parametrize(
    ("fault", "program", "message"),
    [
        (of_singles, MIXED, "mixed step of 16 tokens in 3 rows: a single token over .* keys is wrong: off by 10"),
        (of_decodes, DECODE, "decode of 3 rows: a single token over .* keys is wrong: off by 10"),
        (of_one_value, MIXED, "is wrong: off by"),
        (of_padding, MIXED, "the output of a padding token is not finite"),
        (of_pages, DECODE, "a page that no sequence owns was written to"),
        (of_tokens_in_pages, DECODE, "is wrong: off by"),
    ],
)
def test_a_fault_is_found_and_its_program_named(fault, program, message):
    faulty = type("Faulty", (Faulty,), {"fault": staticmethod(fault)})
    with pytest.raises(SelfTestError, match=message):
        SelfTest(faulty(spec(), Backend.REFERENCE), pages_per_seq=5).run([program])


def test_results_that_change_from_run_to_run_are_found():
    random = np.random.default_rng(0)

    def with_noise(output, pages, metadata):
        noise = io_callback(lambda: random.random(dtype=np.float32), jax.ShapeDtypeStruct((), np.float32))
        return output * (1 + noise * 1e-4), pages

    faulty = type("Faulty", (Faulty,), {"fault": staticmethod(with_noise)})
    test = SelfTest(faulty(spec(), Backend.REFERENCE), pages_per_seq=5)
    assert test.run([DECODE]).num_steps == 2
    with pytest.raises(SelfTestError, match="decode of 3 rows gives other bits when it is run again"):
        test.run([DECODE], repeat=True)


def test_a_kernel_that_does_not_compile_is_named():
    attention = PagedAttention(spec("bfloat16", head_dim=64, page_size=16), Backend.GPU)
    with pytest.raises(
        SelfTestError, match="mixed step of 16 tokens in 3 rows does not compile: ValueError: Only interp"
    ):
        SelfTest(attention, pages_per_seq=5).run([MIXED, DECODE])


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_its_programs_can_be_compiled_before_it_runs(monkeypatch, kv_dtype):
    """By descriptions of their operands: the same programs."""
    lowered: list[str] = []
    compile_it = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda own, *a, **k: lowered.append(own.as_text()) or compile_it(own, *a, **k)
    )
    programs, attention = [MIXED, DECODE], PagedAttention(spec(kv_dtype=kv_dtype), Backend.REFERENCE, None)
    SelfTest(attention, pages_per_seq=4).compile(programs)
    described, lowered = lowered, []
    SelfTest(attention, pages_per_seq=4).run(programs, seed=3)
    assert len(set(described)) == 2 and described == lowered
