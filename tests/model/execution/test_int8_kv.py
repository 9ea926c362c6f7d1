"""Steps over pages of int8: each token is rounded once, and what attends to it sees the rounded one."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from batcher.request import SamplingParams
from batcher.step import Bucket, Variant
from model.execution.kv_range import MARGIN, NUM_TOKENS, measured_range
from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from tests.model.dense_attention import causal_attention
from tests.model.driver import TINY, Row, int8_scales, paged_attention, run, tiny_model, tiny_runner

DECODE, MIXED = Bucket(4, 4, Variant.GREEDY), Bucket(24, 4, Variant.GREEDY)
MAX_LEN = 64
GREEDY = SamplingParams(max_tokens=64, temperature=0)


@cache
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def runner():
    made = tiny_runner(model(), kv_dtype=jnp.int8, max_model_len=MAX_LEN)
    made.warm_up([DECODE, MIXED], lambda line: None)
    return made


def rounded(x, scales):
    """What a page holds of x [T, K, H], by the definition: nearest whole number of units, 127 of them at the most."""
    return jnp.clip(jnp.round(x / scales[:, None]), -127, 127) * scales[:, None]


@cache
def dense_pass():
    attend = causal_attention()

    def of_rounded(queries, keys, values, scales):
        return attend(queries, rounded(keys, scales[0]), rounded(values, scales[1]), None)

    def logits(tokens, scales):
        hidden, _ = model()(tokens, jnp.arange(MAX_LEN), list(scales), of_rounded)
        return model().logits(hidden)

    return jax.jit(logits)


def greedy_text(prompt, length):
    tokens, scales = list(prompt), int8_scales(model())
    for _ in range(length):
        padded = np.zeros(MAX_LEN, np.int32)
        padded[: len(tokens)] = tokens
        tokens.append(int(np.asarray(dense_pass()(padded, scales))[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def prompts(count):
    rng = np.random.default_rng(3)
    return [[int(t) for t in rng.integers(0, TINY.vocab_size, rng.integers(12, 24))] for _ in range(count)]


@pytest.mark.parametrize("chunk", [1, 3, 8, 24])
@pytest.mark.parametrize("company", [0, 2])
def test_a_text_is_the_dense_pass_over_rounded_keys_and_values_however_it_is_cut(runner, chunk, company):
    """Within a chunk queries see the rounded keys of the same step: other tokens would follow from the exact ones."""
    first, *others = prompts(1 + company)
    row = Row(0, first, [1, 2, 3, 4, 5, 6], GREEDY)
    rows = [Row(i, prompt, list(range(10 * i, 10 * i + 8))) for i, prompt in enumerate(others, 1)]
    admit = [row, *rows]
    while row.num_computed < len(first):
        count = min(chunk, len(first) - row.num_computed)
        left = (24 - count) // max(len(rows), 1)
        chunks = [(r, min(left, 5, len(r.tokens) - r.num_computed)) for r in rows]
        run(runner, MIXED, [(row, count), *((r, n) for r, n in chunks if n)], admit=admit)
        admit = []
    for _ in range(11):
        run(runner, DECODE, [(row, 1)])
    assert row.output == greedy_text(first, 12)


def test_a_page_holds_the_same_numbers_however_a_prompt_is_cut(runner):
    (prompt,) = prompts(1)
    for slot, (chunk, pages) in enumerate([(24, [1, 2, 3]), (5, [4, 5, 6])]):
        row = Row(slot, prompt, pages, GREEDY)
        admit = [row]
        while row.num_computed < len(prompt):
            run(runner, MIXED, [(row, min(chunk, len(prompt) - row.num_computed))], admit=admit)
            admit = []
    for kv in runner.state.kv:
        found = np.asarray(kv)
        whole, cut = (found[:, pages].swapaxes(1, 2).reshape(2, 2, -1, 16) for pages in ([1, 2, 3], [4, 5, 6]))
        assert found.dtype == np.int8
        np.testing.assert_array_equal(whole[:, :, : len(prompt)], cut[:, :, : len(prompt)])
        assert np.abs(whole.astype(int)).max() > 60  # the scales use the numbers there are


def test_the_range_is_the_one_of_a_dense_pass():
    config = TINY
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=NUM_TOKENS, dtype=np.int32)
    attend = causal_attention()

    def measure(queries, keys, values, kv):
        attended, _ = attend(queries, keys, values, None)
        return attended, (keys, values)

    nothing = [None] * config.num_layers
    kv = nnx.jit(lambda model: model(tokens, np.arange(NUM_TOKENS), nothing, measure)[1])(model())
    found = measured_range(model())
    assert found.shape == (config.num_layers, 2, config.num_kv_heads)
    for layer, (keys, values) in zip(found, kv, strict=True):
        pairs = np.asarray(keys).reshape(NUM_TOKENS, config.num_kv_heads, 2, -1)
        largest = np.sqrt((pairs**2).sum(2)).max((0, 2)), np.abs(np.asarray(values)).max((0, 2))
        np.testing.assert_allclose(layer, MARGIN * np.stack(largest), rtol=2**-8)
    np.testing.assert_array_equal(found, measured_range(model()))


def test_scales_come_with_pages_of_8_bits_only():
    limits = RunnerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=MAX_LEN, num_pages=8)
    with pytest.raises(ValueError, match="K/V scales come with pages of 8 bits only"):
        ModelRunner(model(), paged_attention(kv_dtype=jnp.int8), limits)
    with pytest.raises(ValueError, match="K/V scales come with pages of 8 bits only"):
        ModelRunner(model(), paged_attention(), limits, int8_scales(model()))
