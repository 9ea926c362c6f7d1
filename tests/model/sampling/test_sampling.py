"""Sampling against oracles that sort, in float64, and against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batcher.grammar import num_mask_words
from batcher.request import (
    MAX_DEVICE_STOP_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    LogprobsMode,
    Request,
    SamplingParams,
)
from batcher.scheduling.request_state import RequestState
from batcher.slots import SlotLayout
from batcher.steps.pack import slot_state
from model.network.row_ops import BY_XLA, RowOpsInC
from model.network.sharding import make_mesh
from model.sampling import sampling
from model.sampling.logprobs import logprobs
from model.sampling.threshold import kept_threshold
from model.sampling.vocab_split import BY_VOCAB, REPLICATED, VocabShard, VocabSplit
from tests.c_compiler import compiler
from tests.examples import examples

VOCAB = 300  # more than two draw blocks, and no multiple of one
ROWS = 8


def make_rows(n: int, **columns) -> sampling.SamplingRows:
    """Rows that ask for nothing but what is given: a scalar or one value per row."""
    f32, i32 = np.float32, np.int32
    defaults = {
        "temperature": (f32, 0), "top_k": (i32, 0), "top_p": (f32, 1), "min_p": (f32, 0),
        "presence_penalty": (f32, 0), "frequency_penalty": (f32, 0), "repetition_penalty": (f32, 1),
        "min_kv_len": (i32, 0), "num_stop_ids": (i32, 0), "num_bias": (i32, 0), "wants_logprobs": (bool, False),
        "wants_sampled_logprobs": (bool, False), "has_mask": (bool, False),
    }  # fmt: skip
    made = {
        name: np.broadcast_to(np.asarray(columns.pop(name, value), dtype), (n,)).copy()
        for name, (dtype, value) in defaults.items()
    }
    wide = {
        "seed": (np.uint32, 2),
        "logprob_token_ids": (i32, MAX_LOGPROB_TOKEN_IDS),
        "stop_ids": (i32, MAX_DEVICE_STOP_IDS),
        "bias_ids": (i32, MAX_LOGIT_BIAS),
        "bias_values": (f32, MAX_LOGIT_BIAS),
    }
    for name, (dtype, width) in wide.items():
        given_value = np.atleast_2d(np.asarray(columns.pop(name, np.zeros((1, 0))), dtype))
        padded = np.zeros((n, width), dtype)
        padded[:, : given_value.shape[1]] = given_value
        made[name] = padded
    assert not columns, columns
    return sampling.SamplingRows(**made)


@cache
def jitted(name: str):
    functions = {
        "adjust": lambda logits, rows, positions, asking, history, masks: sampling.adjust(
            whole(logits), logits, rows, positions, asking, lambda: history, lambda: masks
        ),
        "sample": lambda logits, rows, positions, asking, history, masks: sampling.sample(
            whole(logits), logits, rows, positions, asking, lambda: history, lambda: masks
        ),
        "kept": _kept,
        "logprobs": lambda logits, tokens, asking: logprobs(whole(logits), lambda: logits, tokens[:, None], asking),
    }
    return jax.jit(functions[name])


def whole(logits):
    return VocabShard(vocab_size=logits.shape[-1])


def _kept(logits, rows, asking):
    weights = sampling.tempered_weights(
        VocabShard(vocab_size=logits.shape[-1]), logits, jnp.max(logits, axis=-1), rows.temperature
    )
    asked = {"top_k": rows.top_k, "top_p": rows.top_p, "min_p": rows.min_p}
    return weights, weights >= kept_threshold(whole(logits), weights, **asked, asking=asking)[:, None]


def no_masks(logits):
    return np.zeros((len(logits), num_mask_words(logits.shape[1])), np.int32)


def sample(logits, rows, positions=0, asking=True, history=None, masks=None):
    return sample_scored(logits, rows, positions, asking, history, masks)[0]


def sample_scored(logits, rows, positions=0, asking=True, history=None, masks=None):
    """(tokens, their log-probabilities)"""
    logits = np.asarray(logits, np.float32)
    n, vocab = logits.shape
    drawn = jitted("sample")(
        logits,
        rows,
        np.broadcast_to(np.asarray(positions, np.int32), (n,)).copy(),
        np.broadcast_to(np.asarray(asking), (n,)).copy(),
        np.zeros((n, vocab), np.int32) if history is None else history,
        no_masks(logits) if masks is None else masks,
    )
    return tuple(map(np.asarray, drawn))


def adjust(logits, rows, positions=0, history=None):
    logits = np.asarray(logits, np.float32)
    n, vocab = logits.shape
    history = np.zeros((n, vocab), np.int32) if history is None else np.asarray(history, np.int32)
    positions = np.broadcast_to(np.asarray(positions, np.int32), (n,)).copy()
    return np.asarray(jitted("adjust")(logits, rows, positions, np.ones(n, bool), history, no_masks(logits)))


# The kept sets


@st.composite
def logit_rows(draw):
    """Smooth, peaked, flat and heavily tied distributions."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    scale = draw(st.sampled_from([0.01, 1.0, 5.0, 40.0]))
    logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32) * np.float32(scale)
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    banned = draw(hnp.arrays(bool, (VOCAB,), elements=st.booleans()))
    return np.where(banned & draw(st.booleans()) & (np.arange(VOCAB) > 0), -np.inf, logits).astype(np.float32)


# XLA takes subnormal numbers for 0.
FRACTIONS = st.floats(0.0, 1.0, width=32, allow_subnormal=False)


def columns_of(elements):
    return st.lists(elements, min_size=ROWS, max_size=ROWS)


@settings(max_examples=examples(60), derandomize=True)
@given(
    logit_rows(),
    columns_of(st.sampled_from([0.1, 0.7, 1.0, 1.9])),
    columns_of(st.sampled_from([0, 1, 2, 5, 50, VOCAB - 1, VOCAB, 10 * VOCAB])),
    columns_of(st.one_of(st.just(1.0), FRACTIONS)),
    columns_of(st.one_of(st.just(0.0), FRACTIONS)),
)
def test_kept_tokens_are_the_fewest_that_suffice(logits, temperature, top_k, top_p, min_p):
    rows = make_rows(ROWS, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    weights, kept = jitted("kept")(logits, rows, np.ones(ROWS, bool))
    weights, kept = np.asarray(weights, np.float64), np.asarray(kept)
    for i in range(ROWS):
        strict, loose = (
            sorted_threshold(weights[i], top_k[i], np.float32(top_p[i]), np.float32(min_p[i]), slack=slack)
            for slack in (-1e-5, 1e-5)
        )
        assert kept[i][weights[i] >= strict].all()
        assert not kept[i][weights[i] < loose].any()


def sorted_threshold(weights, top_k, top_p, min_p, *, slack):
    """The least weight that is kept. `slack` moves top_p by what float32 sums may be off."""
    order = np.sort(weights)[::-1]
    of_top_k = order[order >= order[min(top_k, len(order)) - 1]] if top_k else order  # ties are kept together
    share = np.cumsum(of_top_k) / of_top_k.sum()
    num_of_top_p = len(of_top_k) if top_p == 1 else np.searchsorted(share, top_p + slack) + 1
    least = of_top_k[min(num_of_top_p, len(of_top_k)) - 1]
    return max(least, min_p)


def test_no_program_sorts():
    logits, positions = jnp.zeros((4, 1000)), jnp.zeros(4, jnp.int32)
    history = jnp.zeros((4, 1000), jnp.int32)
    lowered = jitted("sample").lower(logits, make_rows(4), positions, jnp.ones(4, bool), history, no_masks(logits))
    assert "stablehlo.sort" not in lowered.as_text()
    assert "top_k" not in lowered.as_text()


# The distribution


def expected_distribution(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0, tempered_first=True):
    """By sorting, in float64, in the documented order."""
    x = np.asarray(logits, np.float64)

    def softmax(x):
        e = np.exp(x - x.max())
        return e / e.sum()

    p = softmax(x / temperature if tempered_first else x)
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
    p[p < min_p * p.max()] = 0
    if not tempered_first:
        p = np.where(p > 0, softmax(x / temperature) * (p > 0), 0)
    return p / p.sum()


def draw_many(logits, n=8192, seed=3, **columns):
    """n draws of one distribution, at n positions of one request."""
    at_once = 1024
    rows = make_rows(at_once, seed=[seed, 11], **columns)
    batch = np.broadcast_to(np.asarray(logits, np.float32), (at_once, len(logits)))
    return np.concatenate([sample(batch, rows, positions=start + np.arange(at_once)) for start in range(0, n, at_once)])


def p_value(draws, expected):
    """Of Pearson's chi-square test; tokens expected less than ten times are taken together."""
    from scipy import stats  # takes a second, which every process would spend that collects tests

    counts = np.bincount(draws, minlength=len(expected))
    assert counts[expected == 0].sum() == 0, "a token that must not be drawn was drawn"
    wanted = expected * len(draws)
    often = wanted >= 10
    observed = np.append(counts[often], counts[~often].sum())
    predicted = np.append(wanted[often], wanted[~often].sum())
    if predicted[-1] < 10:
        observed, predicted = observed[:-1], predicted[:-1] * observed[:-1].sum() / predicted[:-1].sum()
    return stats.chisquare(observed, predicted).pvalue


LOGITS = np.random.default_rng(5).normal(size=VOCAB).astype(np.float32) * 1.5

DISTRIBUTIONS = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "top_k": {"temperature": 1.0, "top_k": 12},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "hot top_p": {"temperature": 1.8, "top_p": 0.6},
    "hot min_p": {"temperature": 1.8, "min_p": 0.2},
    "everything": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
}


@cache
def draws_of(case):
    return draw_many(LOGITS, **DISTRIBUTIONS[case])


@pytest.mark.parametrize("case", DISTRIBUTIONS)
def test_draws_follow_the_exact_distribution(case):
    assert p_value(draws_of(case), expected_distribution(LOGITS, **DISTRIBUTIONS[case])) > 1e-3


@pytest.mark.parametrize("case", ["hot top_p", "hot min_p"])
def test_the_chi_square_test_sees_a_wrong_order(case):
    draws = draws_of(case)
    wrong = expected_distribution(LOGITS, **DISTRIBUTIONS[case], tempered_first=False)
    drawn_outside = set(draws) - set(np.flatnonzero(wrong))
    assert drawn_outside or p_value(draws, wrong) < 1e-6


def test_draws_of_a_wide_flat_vocabulary_are_uniform():
    vocab = 2000
    draws = draw_many(np.zeros(vocab), n=24576, temperature=1.0)
    assert p_value(draws, np.full(vocab, 1 / vocab)) > 1e-3


# What is applied before


def test_penalties_by_hand():
    in_prompt = sampling.IN_PROMPT
    logits = [[2.0, -2.0, 3.0, 1.0, -1.0, 0.5]]
    history = [[0, in_prompt, in_prompt + 1, 3, 1, 0]]
    repetition = adjust(logits, make_rows(1, repetition_penalty=2.0), history=history)
    np.testing.assert_allclose(repetition, [[2.0, -4.0, 1.5, 0.5, -2.0, 0.5]])
    frequency = adjust(logits, make_rows(1, frequency_penalty=0.5), history=history)
    np.testing.assert_allclose(frequency, [[2.0, -2.0, 2.5, -0.5, -1.5, 0.5]])
    presence = adjust(logits, make_rows(1, presence_penalty=0.25), history=history)
    np.testing.assert_allclose(presence, [[2.0, -2.0, 2.75, 0.75, -1.25, 0.5]])
    together = make_rows(1, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    np.testing.assert_allclose(adjust(logits, together, history=history), [[2.0, -4.0, 0.75, -1.25, -2.75, 0.5]])


def test_logits_are_adjusted_in_the_states_of_loops():
    """A conditional would copy them: with 256 rows and 128,256 tokens, 131 MB."""
    logits = np.zeros((256, 128_256), np.float32)
    arguments = (logits, make_rows(256), np.zeros(256, np.int32), np.ones(256, bool))
    traced = jitted("adjust").trace(*arguments, np.zeros_like(logits, np.int32), no_masks(logits))

    def makers(jaxpr):
        return [equation for equation in jaxpr.eqns if any(v.aval.shape == logits.shape for v in equation.outvars)]

    (outer,) = makers(traced.jaxpr)
    inner = makers(outer.params["body_jaxpr"].jaxpr)
    assert [equation.primitive.name for equation in (outer, *inner)] == ["while"] * 5


def test_stop_ids_are_banned_until_min_tokens_are_out():
    rows = make_rows(3, num_stop_ids=[2, 2, 0], stop_ids=[4, 1], min_kv_len=[10, 10, 10])
    logits = np.tile(np.array([0.0, 5.0, 1.0, 2.0, 9.0], np.float32), (3, 1))
    # The row at position 9 draws a token too early to stop; at 10 it may; the third row has no stop ids.
    np.testing.assert_array_equal(sample(logits, rows, positions=[9, 10, 9]), [3, 4, 4])


def test_rows_that_ask_for_nothing_are_untouched_bit_for_bit():
    logits = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32)
    rows = make_rows(
        4,
        num_bias=[1, 0, 0, 0],
        bias_values=[3.0],
        frequency_penalty=[0, 1.0, 0, 0],
        num_stop_ids=[0, 0, 2, 0],
        min_kv_len=99,
    )
    adjusted = adjust(logits, rows, history=np.ones((4, VOCAB)))
    assert (adjusted[:3] != logits[:3]).any(axis=1).all()
    np.testing.assert_array_equal(adjusted[3], logits[3])


def test_temperature_zero_takes_the_best_of_the_adjusted_logits():
    logits = np.array([[1.0, 3.0, 2.0], [1.0, 3.0, 3.0]], np.float32)
    rows = make_rows(2, num_bias=[1, 0], bias_ids=[1], bias_values=[-5.0], top_k=1, top_p=0.1)
    np.testing.assert_array_equal(sample(logits, rows), [2, 1])  # the first of equals


# Independence


def mixed_rows(n, vocab=VOCAB):
    rng = np.random.default_rng(1)
    return {
        "temperature": rng.choice([0.0, 0.7, 1.3], n),
        "top_k": rng.choice([0, 3, 40], n),
        "top_p": rng.choice([1.0, 0.9, 0.5], n),
        "min_p": rng.choice([0.0, 0.05], n),
        "presence_penalty": rng.choice([0.0, 0.5], n),
        "repetition_penalty": rng.choice([1.0, 1.2], n),
        "num_bias": rng.choice([0, 2], n),
        "seed": rng.integers(0, 2**32, (n, 2), dtype=np.uint32),
        "bias_ids": rng.integers(0, vocab, (n, 2)),
        "bias_values": rng.normal(size=(n, 2)),
    }


def test_a_rows_token_does_not_depend_on_its_neighbours():
    n = 16
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(n, VOCAB)).astype(np.float32) * 3
    history = rng.integers(0, 2, (n, VOCAB)).astype(np.int32)
    positions = rng.integers(0, 99, n).astype(np.int32)
    columns = mixed_rows(n)
    together = sample(logits, make_rows(n, **columns), positions, history=history)
    assert len(set(together)) > n // 2
    for order in (np.arange(n)[::-1], rng.permutation(n)):
        moved = make_rows(n, **{name: value[order] for name, value in columns.items()})
        np.testing.assert_array_equal(
            sample(logits[order], moved, positions[order], history=history[order]), together[order]
        )
    for i in range(n):  # alone: nobody else asks
        alone = sample(logits, make_rows(n, **columns), positions, asking=np.arange(n) == i, history=history)
        assert alone[i] == together[i]


def test_seed_and_position_choose_the_draw():
    logits = np.zeros((ROWS, VOCAB), np.float32)

    def draws(seed, positions):
        return sample(logits, make_rows(ROWS, temperature=1, seed=seed), positions)

    base = draws([1, 0], np.arange(ROWS))
    np.testing.assert_array_equal(draws([1, 0], np.arange(ROWS)), base)
    assert len(set(base)) > ROWS // 2
    for other in (draws([2, 0], np.arange(ROWS)), draws([1, 1], np.arange(ROWS)), draws([1, 0], np.arange(ROWS) + 9)):
        assert (other != base).sum() > ROWS // 2


def test_rows_that_do_not_ask_may_hold_anything():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 7] = 9
    rows = make_rows(2, temperature=[0, np.nan], top_k=[0, -5], top_p=[1, np.nan], repetition_penalty=[1, 0])
    assert sample(logits, rows, asking=[True, False])[0] == 7


def test_a_row_of_nans_yields_a_legal_token():
    logits = np.full((2, VOCAB), np.nan, np.float32)
    tokens = sample(logits, make_rows(2, temperature=[0, 1], top_p=0.9))
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


# Log-probabilities


def test_logprobs_are_of_the_raw_distribution():
    logits = np.random.default_rng(4).normal(size=(3, VOCAB)).astype(np.float32) * 4
    tokens = np.array([5, 250, 7], np.int32)
    found = jitted("logprobs")(logits, tokens, np.array([True, False, False]))
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found.named[:, 0], exact[np.arange(3), tokens], atol=1e-5)
    order = np.argsort(-exact, axis=1)[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(exact, order, axis=1), atol=1e-5)


LARGE_VOCAB = 128_256  # many chunks of the C code's sums; of four shards, some hold no token that is kept
RESTRICTED = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.5},
    "all three": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "a mask": {"has_mask": True},
    "a mask of one token": {"has_mask": True},
    "nothing": {},
}


BY_DEFAULT = [(LogprobsMode.PROCESSED_LOGPROBS, 2, False), (LogprobsMode.PROCESSED_LOGPROBS, 1, True)]
ALL_FORMS = [(mode, *form) for mode in LogprobsMode for form in ((1, True), (2, False), (4, True))]


@pytest.mark.parametrize(
    ("mode", "num_shards", "in_c"),
    [pytest.param(*form, marks=() if form in BY_DEFAULT else pytest.mark.slow) for form in ALL_FORMS],
)
def test_logprobs_of_a_large_vocabulary_of_which_few_tokens_are_kept(mode, num_shards, in_c):
    """Each row has a restriction of its own. The tokens that are likely are of one chunk, and of one shard. They ask
    for other tokens of all shards, too."""
    if in_c:
        compiler()
    n = len(RESTRICTED)
    rng = np.random.default_rng(3)
    logits = rng.normal(size=LARGE_VOCAB).astype(np.float32)
    logits[70_000:70_040] += np.linspace(12, 15, 40, dtype=np.float32)
    columns = {
        name: [each.get(name, off) for each in RESTRICTED.values()]
        for name, off in {"top_k": 0, "top_p": 1, "min_p": 0, "has_mask": False}.items()
    }
    rows = make_rows(n, temperature=0.8, **columns)
    allowed = {4: np.array([5, 70_003, 70_004, 128_255]), 5: np.array([128_000])}
    masks = np.zeros((n, num_mask_words(LARGE_VOCAB)), np.int32)
    for row, tokens in allowed.items():
        bits = np.zeros(masks.shape[1] * 32, np.uint8)
        bits[tokens] = 1
        masks[row] = np.packbits(bits, bitorder="little").view(np.int32)
    asked = np.array([[0, 70_003, 70_039, 128_000, 128_255, *rng.integers(0, LARGE_VOCAB, 123)]] * n, np.int32)
    best = np.array([max(allowed.get(row, range(LARGE_VOCAB)), key=logits.__getitem__) for row in range(n)], np.int32)

    def found(shard, logits, masks, rows):
        positions, asking = jnp.zeros(n, jnp.int32), jnp.ones(n, bool)
        given = (lambda: jnp.zeros(logits.shape, jnp.int32), lambda: masks)
        scored = partial(sampling.processed, shard, logits, rows, positions, asking, *given)
        tokens = np.concatenate([best[:, None], asked], axis=1)
        return logprobs(shard, scored if mode.is_processed else lambda: logits, tokens, asking, mode)

    split = VocabSplit(
        LARGE_VOCAB, make_mesh(num_shards) if num_shards > 1 else None, ops=RowOpsInC() if in_c else BY_XLA
    )
    specs = {"in_specs": (BY_VOCAB, REPLICATED, REPLICATED), "out_specs": REPLICATED}
    result = jax.jit(partial(split.run, found, **specs))(np.tile(logits, (n, 1)), masks, rows)

    scores = np.tile(logits.astype(np.float64), (n, 1))
    if mode.is_processed:
        scores /= np.float64(np.float32(0.8))
        for row, restriction in enumerate(RESTRICTED.values()):
            closed = np.setdiff1d(np.arange(LARGE_VOCAB), allowed.get(row, np.arange(LARGE_VOCAB)))
            adjusted = logits.astype(np.float64)
            adjusted[closed] = -np.inf
            kept = {name: value for name, value in restriction.items() if name != "has_mask"}
            scores[row, expected_distribution(adjusted, temperature=0.8, **kept) == 0] = -np.inf
    exact = scores if mode.are_logits else scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    own = np.concatenate([best[:, None], asked], axis=1)
    np.testing.assert_allclose(result.named, np.take_along_axis(exact, own, axis=1), atol=2e-5)
    np.testing.assert_array_equal(result.ranks, 1 + (exact > exact[np.arange(n), best, None]).sum(axis=1))
    np.testing.assert_allclose(result.top, -np.sort(-exact, axis=1)[:, :MAX_LOGPROBS], atol=2e-5)


def adjusted_by_hand(logits, *, bias, counts, in_prompt, repetition, frequency, presence, closed):
    """f64[V], in the documented order."""
    x = np.asarray(logits, np.float64).copy()
    for token, value in bias.items():
        x[token] += value
    seen = in_prompt | (counts > 0)
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    x -= frequency * counts + presence * (counts > 0)
    x[closed] = -np.inf
    return x


@pytest.mark.parametrize(("num_shards", "in_c"), [(1, True), (4, False)])
@pytest.mark.parametrize("case", DISTRIBUTIONS)
def test_sampled_logprobs_are_of_the_distribution_that_the_token_was_drawn_from(case, num_shards, in_c):
    """Of all stages before the draw together. The last rows are greedy: theirs is the distribution before the
    temperature."""
    if in_c:
        compiler()
    n, num_greedy = 24, 4
    rng = np.random.default_rng(8)
    logits = np.tile(LOGITS, (n, 1))
    counts, in_prompt = rng.integers(0, 3, VOCAB), rng.random(VOCAB) < 0.2
    history = np.tile((counts + in_prompt * sampling.IN_PROMPT).astype(np.int32), (n, 1))
    open_tokens = np.sort(rng.choice(VOCAB, 200, replace=False))
    banned = [int(open_tokens[0]), int(np.argmax(LOGITS))]
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.7}
    steered = {"num_bias": 2, "bias_ids": open_tokens[5:7], "bias_values": [2.5, 1.5], "has_mask": True}
    stops = {"min_kv_len": 1000, "num_stop_ids": 2, "stop_ids": banned}
    temperature = np.full(n, DISTRIBUTIONS[case]["temperature"])
    temperature[-num_greedy:] = 0
    rows = make_rows(
        n, **DISTRIBUTIONS[case] | penalties | steered | stops | {"temperature": temperature},
        seed=rng.integers(0, 2**32, (n, 2), dtype=np.uint32), wants_sampled_logprobs=True,
    )  # fmt: skip
    closed = np.setdiff1d(np.arange(VOCAB), np.setdiff1d(open_tokens, banned))
    exact = adjusted_by_hand(
        LOGITS, bias=dict(zip(open_tokens[5:7], [2.5, 1.5], strict=True)), counts=counts, in_prompt=in_prompt,
        repetition=1.3, frequency=0.4, presence=-0.7, closed=closed,
    )  # fmt: skip
    drawn_from = expected_distribution(exact, **DISTRIBUTIONS[case])

    def draw(shard, logits, history, masks, rows):
        positions, asking = jnp.arange(n, dtype=jnp.int32), jnp.ones(n, bool)
        return sampling.sample(shard, logits, rows, positions, asking, lambda: history, lambda: masks)

    split = VocabSplit(VOCAB, make_mesh(num_shards) if num_shards > 1 else None, ops=RowOpsInC() if in_c else BY_XLA)
    specs = {"in_specs": (BY_VOCAB, BY_VOCAB, REPLICATED, REPLICATED), "out_specs": REPLICATED}
    masks = np.tile(mask_of(open_tokens), (n, 1))
    tokens, scores = jax.jit(partial(split.run, draw, **specs))(logits, history, masks, rows)
    tokens = np.asarray(tokens)
    assert len(set(tokens[:-num_greedy].tolist())) > 3
    np.testing.assert_allclose(scores[:-num_greedy], np.log(drawn_from[tokens[:-num_greedy]]), atol=5e-6)
    assert set(tokens[-num_greedy:].tolist()) == {int(np.argmax(exact))}
    greedy = np.log(expected_distribution(exact, temperature=1.0)[tokens[-1]])
    np.testing.assert_allclose(scores[-num_greedy:], greedy, atol=5e-6)


def test_a_token_that_is_certain_has_the_logprob_zero():
    rows = make_rows(2, temperature=[0.7, 1.3], top_k=[1, 0], top_p=[1, 1e-6], wants_sampled_logprobs=True)
    tokens, scores = sample_scored(np.stack([LOGITS, LOGITS]), rows)
    assert tokens.tolist() == [int(np.argmax(LOGITS))] * 2
    assert scores.tolist() == [0.0, 0.0]


def test_tokens_are_the_same_whoever_asks_for_their_logprobs():
    n = 16
    logits = np.random.default_rng(2).normal(size=(n, VOCAB)).astype(np.float32) * 3
    columns, history = mixed_rows(n), np.ones((n, VOCAB), np.int32)
    tokens, none = sample_scored(logits, make_rows(n, **columns), history=history)
    assert not none.any()
    wants = np.arange(n) % 2 == 0
    asked, scores = sample_scored(logits, make_rows(n, **columns, wants_sampled_logprobs=wants), history=history)
    np.testing.assert_array_equal(asked, tokens)
    greedy = columns["temperature"] == 0
    assert (scores[wants] <= 0).all() and (scores[wants & ~greedy] < 0).any() and (scores[wants & greedy] < 0).any()
    # Rows that do not emit ask for nothing.
    _, silent = sample_scored(logits, make_rows(n, **columns, wants_sampled_logprobs=wants), asking=~wants)
    assert not silent.any()


def test_no_logprobs_are_computed_where_none_are_asked_for():
    found = jitted("logprobs")(np.zeros((3, VOCAB), np.float32), np.zeros(3, np.int32), np.zeros(3, bool))
    assert not np.asarray(found.named).any()


def test_a_vocabulary_smaller_than_the_top_is_padded():
    logits = np.log(np.array([[0.5, 0.125, 0.375]], np.float32))
    found = jitted("logprobs")(logits, np.array([2], np.int32), np.array([True]))
    np.testing.assert_array_equal(found.top_ids[0, :4], [0, 2, 1, -1])
    assert np.asarray(found.top)[0, 3] == -np.inf


def test_what_the_packer_writes_is_what_the_device_reads():
    """A new parameter's column is in both, or this fails."""
    asked = SamplingParams(
        max_tokens=9,
        min_tokens=3,
        temperature=0.7,
        top_k=11,
        top_p=0.6,
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias=((5, -2.0), (7, 3.5)),
        logprob_token_ids=(3, 9),
        sampled_logprobs=True,
    )
    request = Request(request_id="a", prompt=(1, 2, 3, 4), sampling=asked)
    sequence = RequestState(
        request, np.arange(4, dtype=np.int32), limit=9, stop_ids=frozenset({8, 2}), seed=(5 << 32) + 0xFFFFFFFE,
        arrived_s=0.0, on_output=print,
    )  # fmt: skip
    state = np.zeros((1, SlotLayout.width(2)), np.int32)
    columns, values = slot_state(sequence, page_size=4)
    state[0, columns] = values
    rows = sampling.sampling_rows(jnp.asarray(state))
    stop_ids, bias_ids, bias_values = [2, 8] + [0] * 14, [5, 7] + [0] * 298, [-2.0, 3.5] + [0] * 298
    expected = make_rows(
        1, temperature=0.7, top_k=11, top_p=0.6, min_p=0.25, presence_penalty=0.5, frequency_penalty=-1.5,
        repetition_penalty=1.25, seed=[0xFFFFFFFE, 5], min_kv_len=7, num_stop_ids=2, stop_ids=stop_ids, num_bias=2,
        bias_ids=bias_ids, bias_values=bias_values, wants_logprobs=True, wants_sampled_logprobs=True,
        logprob_token_ids=[3, 9] + [0] * 126,
    )  # fmt: skip
    for field in dataclasses.fields(rows):
        np.testing.assert_array_equal(getattr(rows, field.name), getattr(expected, field.name), field.name)
    assert rows.has_penalty.tolist() == [True]


# Masks


def mask_of(tokens, vocab=VOCAB):
    bits = np.zeros(num_mask_words(vocab) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_only_what_the_mask_lets_through_is_drawn():
    rng = np.random.default_rng(5)
    logits = np.tile(rng.normal(size=(1, VOCAB)).astype(np.float32) * 5, (400, 1))
    let_through = [[31, 32, 64, 299], [0], [255, 256]]
    masks = np.stack([mask_of(let_through[i % 3]) for i in range(400)])
    rows = make_rows(400, temperature=np.arange(400) % 2 * 1.5, top_p=0.99, top_k=3, has_mask=np.arange(400) % 4 > 0)
    tokens = sample(logits, rows, positions=np.arange(400), masks=masks)
    for i, token in enumerate(tokens):
        assert i % 4 == 0 or token in let_through[i % 3]
    assert len({tokens[i] for i in range(400) if i % 4 and i % 3 == 0}) > 1
    assert set(tokens[::4]) - {31, 32, 64, 299, 0, 255, 256}, "rows without a mask draw what they like"
    greedy = [max(let_through[i % 3], key=lambda t: logits[0, t]) for i in range(400)]
    assert all(tokens[i] == greedy[i] for i in range(2, 400, 4))


def test_a_mask_comes_after_the_bans_of_min_tokens():
    logits = np.zeros((1, VOCAB), np.float32)
    rows = make_rows(1, has_mask=True, min_kv_len=9, num_stop_ids=1, stop_ids=[3])
    assert sample(logits, rows, positions=5, masks=mask_of([3, 8])[None]).tolist() == [8]
