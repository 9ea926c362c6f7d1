"""The parts of a step with drafts: what a lookup finds, penalties after drafts, and attention of a few tokens."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batcher.slots import SlotLayout
from batcher.step import StepHandle, StepInput
from model.execution.prompt_lookup import PromptLookup, propose
from model.execution.rows import StepRows
from model.execution.runner import ModelRunner
from model.execution.speculative_step import draw_after_drafts
from model.network.sharding import make_mesh
from model.sampling.vocab_split import BY_VOCAB, REPLICATED, VocabSplit
from pallas_kernels.spec import RaggedBatch
from tests.model.driver import paged_attention, tiny_model
from tests.model.execution.drafting import DRAFTS, FEW, requests, serve, warm_runner

pytestmark = pytest.mark.slow

LOOKUP = PromptLookup(min_tokens=1, max_tokens=3)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return warm_runner(tiny_model(), lookup=LOOKUP, max_draft_rows=4)


def test_steps_without_drafts_look_up_when_they_are_asked_to(runner, monkeypatch) -> None:
    execute, told = runner.execute, {0: [], 1: []}

    def spy(step: StepInput) -> StepHandle:
        handle = execute(step)
        output = handle.result()
        if step.bucket.decode_only:
            told[int(step.packed[3])].append(output.would_accept.any())
        return handle

    monkeypatch.setattr(runner, "execute", spy)
    serve(runner, DRAFTS, requests([{"allowed_token_ids": FEW[:2]}] * 4), weights_cost_tokens=0.0)  # drafts never pay
    assert any(told[1])
    assert told[0]
    assert not any(told[0])


@pytest.mark.parametrize("num_shards", [1, 2])
def test_penalties_count_the_drafts_before_a_place_and_keep_the_accepted_ones(num_shards) -> None:
    """Greedy: each draft is the token with the greatest logit until the penalty for its earlier copies counts."""
    vocab, split = 8, VocabSplit(8, make_mesh(num_shards) if num_shards > 1 else None)
    state = np.zeros((2, SlotLayout.width(4)), np.int32)
    state[:, SlotLayout.at("frequency_penalty")] = np.array([0.4, 0.0], np.float32).view(np.int32)
    state[:, SlotLayout.at("repetition_penalty")] = np.float32(1).view(np.int32)
    places = StepRows(
        slots=jnp.array([1] * 4 + [0] * 4),
        state=jnp.repeat(jnp.array(state), 4, axis=0),
        starts=jnp.array([0, 4, 8]),
        past=jnp.arange(8),
        kv_lens=jnp.arange(8) + 1,
        emits=jnp.array([True] * 8),
    )
    logits = jnp.tile(jnp.array([0, 0, 1.0, 0, 0, 0.3, 0, 0]), (8, 1))
    specs = {
        "in_specs": (BY_VOCAB, BY_VOCAB, *[REPLICATED] * 3),
        "out_specs": (REPLICATED, REPLICATED, BY_VOCAB),
    }
    drawn, _, history = jax.jit(partial(split.run, draw_after_drafts, **specs))(
        logits,
        jnp.zeros((2, vocab), jnp.int32),
        jnp.full((2, 1), -1, jnp.int32),
        places,
        jnp.array([[2, 2, 2], [2, 2, 5]]),
    )
    # The first row's token 2 has 1.0, 0.6 and 0.2, below the 0.3 of token 5: two of its drafts are accepted.
    assert drawn.tolist() == [[2, 2, 5, 5], [2, 2, 2, 2]]
    assert history.tolist() == [[0] * 8, [0, 0, 2, 0, 0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),  # the two last tokens, and what followed them
        ([1, 2, 9, 5, 2, 8, 1, 2], [9, 5, 2]),  # two matching tokens count for more than a later one
        ([7, 1, 7, 2, 7], [2, 7, 2]),  # of equal matches the last; the text repeats with its period
        ([5, 5, 5, 5], [5, 5, 5]),
        ([1, 2, 3, 4], None),
        ([4], None),
        ([6, 1, 2, 3, 4, 6, 1, 2, 3, 5, 0, 1, 2, 3], [5, 0, 1]),  # more than three tokens are not compared
    ],
)
def test_drafts_are_what_followed_the_last_tokens_before(text, expected) -> None:
    padded = np.full((2, 16), 4, np.int32)
    padded[0, : len(text)] = text
    padded[1, : len(text)] = text
    drafts, found = propose(jnp.array(padded), jnp.array([len(text) - 1, 0]), 3, LOOKUP)
    assert found.tolist() == [expected is not None, False]
    if expected is not None:
        assert drafts[0].tolist() == expected


def test_fewer_matching_tokens_than_asked_for_are_no_match() -> None:
    text = jnp.array([[1, 2, 3, 1, 4, 1]])
    for least, is_found in ((1, True), (2, False)):
        assert propose(text, jnp.array([5]), 2, PromptLookup(min_tokens=least, max_tokens=4))[1].tolist() == [is_found]


def test_rows_of_few_tokens_attend_as_longer_ones_do() -> None:
    attention, rng = paged_attention(), np.random.default_rng(0)
    batch = RaggedBatch(
        page_table=jnp.array([[1, 0], [2, 3], [4, 5], [0, 0]]),
        kv_lens=jnp.array([5, 9, 16, 0]),
        query_starts=jnp.array([0, 1, 4, 8, 8]),
        num_singles=jnp.int32(1),
        num_rows=jnp.int32(3),
    )
    queries, keys, values = (jnp.array(rng.normal(size=(16, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    pages = jnp.array(rng.normal(size=attention.kv_pages(6).shape), jnp.float32)

    @partial(jax.jit, static_argnums=0)
    def attend(spec_decode: bool) -> tuple[jax.Array, jax.Array]:
        metadata = attention.make_metadata(batch, num_tokens=16, decode_only=False, spec_decode=spec_decode)
        return attention(queries, keys, values, pages, metadata)

    (out, kv), (few_out, few_kv) = attend(False), attend(True)
    np.testing.assert_allclose(few_out[:8], out[:8], atol=1e-5)
    np.testing.assert_array_equal(few_kv, kv)
