"""Sampling on parts of the vocabulary: the tokens of one device, whatever the number of chips and where they cut."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batcher.grammar import num_mask_words
from model.network.sharding import make_mesh
from model.sampling import sampling
from model.sampling.logprobs import logprobs
from model.sampling.vocab_split import BY_VOCAB, REPLICATED, VocabSplit
from tests.model.sampling.test_sampling import make_rows, mixed_rows

pytestmark = pytest.mark.slow

ROWS, ROWS_OF_MANY = 24, 4  # where the vocabulary is Llama 3's, in which a row takes most of a tenth of a second
# Drawn by the sort-free sampler of one device that summed in float32, before the vocabulary could be split.
GOLDEN = {
    1536: [
        469, 1122, 1329, 1141, 390, 282, 722, 1151, 871, 553, 297, 1164, 985, 917, 1103, 1120, 62, 740, 1322, 832, 399,
        324, 590, 542,
    ],
    128256: [57317, 26530, 56928, 107956],
}  # fmt: skip


@cache
def program(vocab: int, num_shards: int):
    """(tokens, their log-probabilities in the draw, and those of the logits) of (logits, history, rows, positions)."""

    def draw(shard, logits, history, masks, rows, positions):
        asking = jnp.ones(logits.shape[0], bool)
        tokens, scores = sampling.sample(shard, logits, rows, positions, asking, lambda: history, lambda: masks)
        return tokens, scores, logprobs(shard, lambda: logits, tokens[:, None], asking)

    split = VocabSplit(vocab, make_mesh(num_shards) if num_shards > 1 else None)
    specs = {"in_specs": (BY_VOCAB, BY_VOCAB, REPLICATED, REPLICATED, REPLICATED), "out_specs": REPLICATED}
    return jax.jit(lambda *args: split.run(draw, *args, **specs))


@cache
def drawn(vocab: int, num_shards: int, kind: str):
    """Of rows that ask for everything there is."""
    arrays = inputs(vocab, kind)
    bans = {"min_kv_len": 80, "num_stop_ids": 2, "stop_ids": [1, 95]} if "flat" in kind else {}
    bans |= {"has_mask": np.arange(ROWS) % 3 > 0} if "masked" in kind else {}
    rows = make_rows(ROWS, **mixed_rows(ROWS, vocab), **bans, wants_sampled_logprobs=True)
    logits, history, positions, rows, masked = jax.tree.map(
        lambda x: x[:ROWS_OF_MANY] if vocab > 100_000 else x, (*arrays, rows, masks(vocab))
    )
    return jax.tree.map(np.asarray, program(vocab, num_shards)(logits, history, masked, rows, positions))


def masks(vocab: int) -> np.ndarray:
    """Of few tokens, whatever lies past the vocabulary."""
    words = np.random.default_rng(vocab).integers(0, 2**32, (4, ROWS, num_mask_words(vocab)), dtype=np.uint32)
    return np.bitwise_and.reduce(words).view(np.int32)


def inputs(vocab: int, kind: str):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(ROWS, vocab)) * 3).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # ties
    if "flat" in kind:
        logits = np.round(logits / 3)  # hundreds of ties, over all chips
    history = rng.integers(0, 2, (ROWS, vocab)).astype(np.int32)
    return logits, history, np.arange(ROWS, dtype=np.int32) * 7


@pytest.mark.parametrize("vocab", GOLDEN)
def test_one_device_draws_what_it_always_drew(vocab):
    tokens, _, _ = drawn(vocab, 1, "normal")
    assert tokens.tolist() == GOLDEN[vocab]


@pytest.mark.parametrize(
    ("vocab", "num_shards", "kind"),
    [
        *((*sizes, kind) for sizes in [(96, 8), (1000, 4)] for kind in ("normal", "flat", "masked")),
        *((128256, 8, kind) for kind in ("normal", "flat and masked")),
    ],
)
def test_any_number_of_chips_draws_the_same_tokens(vocab, num_shards, kind):
    """A part has 12 tokens, so many parts share a block of 128; 250 tokens, a block and shares of one or two; with
    Llama 3's vocabulary 125 blocks and a quarter, and one part that begins with a whole block."""
    tokens, scores, found = drawn(vocab, num_shards, kind)
    expected_tokens, expected_scores, expected = drawn(vocab, 1, kind)
    np.testing.assert_array_equal(tokens, expected_tokens)
    assert (scores <= 0).all() and (scores < 0).any()
    np.testing.assert_allclose(scores, expected_scores, atol=1e-6)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.top, expected.top, atol=1e-5)
    np.testing.assert_allclose(found.named, expected.named, atol=1e-5)


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("kind", ["normal", "flat"])
def test_ranks_count_the_more_likely_tokens_of_all_chips(kind, num_shards):
    logits, _, _ = inputs(1000, kind)
    tokens = np.random.default_rng(5).integers(0, 1000, ROWS).astype(np.int32)
    tokens[:3] = logits[:3].argmax(axis=1)
    split = VocabSplit(1000, make_mesh(num_shards) if num_shards > 1 else None)

    def ranked(shard, logits, tokens):
        return logprobs(shard, lambda: logits, tokens[:, None], jnp.ones(ROWS, bool))

    run = jax.jit(partial(split.run, ranked, in_specs=(BY_VOCAB, REPLICATED), out_specs=REPLICATED))
    found = run(logits, tokens)
    own = logits[np.arange(ROWS), tokens]
    np.testing.assert_array_equal(found.ranks, 1 + (logits > own[:, None]).sum(axis=1))
    assert found.ranks[:3].tolist() == [1, 1, 1]
    exact = own - np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(found.named[:, 0], exact, atol=1e-5)
