"""Rows in blocks: the results of all rows at once, for any number of them, and no block more than are used."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.grammar import num_mask_words
from batcher.request import LogprobsMode
from batcher.slots import SlotLayout
from model.execution.rows import StepRows
from model.execution.step import draw
from model.sampling.row_blocks import ROWS, in_blocks
from model.sampling.vocab_split import VocabSplit
from tests.examples import examples

pytestmark = pytest.mark.slow

VOCAB, SLOTS = 200, 48


@settings(max_examples=examples(12), derandomize=True)
@given(num_rows=st.integers(1, 4 * ROWS), data=st.data())
def test_each_used_row_is_worked_on_once(num_rows, data):
    num_used = data.draw(st.integers(0, num_rows))
    values = np.random.default_rng(num_rows).integers(1, 100, (num_rows, 3)).astype(np.int32)
    values[num_used:] = 0

    def double(rows, kept):
        return {"twice": 2 * rows["x"]}, kept + jnp.sum(rows["x"])

    results, kept = in_blocks(double, {"x": jnp.asarray(values)}, jnp.int32(5), jnp.int32(num_used))
    np.testing.assert_array_equal(results["twice"], 2 * values)
    assert kept == 5 + values.sum()


@pytest.mark.parametrize("num_used", [0, 1, ROWS, ROWS + 1, 3 * ROWS])
def test_there_are_as_many_blocks_as_are_used(num_used):
    def count(rows, kept):
        return rows, kept + 1

    rows = jnp.ones((3 * ROWS, 2), jnp.int32)
    results, blocks = in_blocks(count, rows, jnp.int32(0), jnp.int32(num_used))
    assert blocks == -(-num_used // ROWS)
    np.testing.assert_array_equal(results.sum(axis=1) > 0, np.arange(3 * ROWS) < blocks * ROWS)


def mixed_state(num_rows: int) -> np.ndarray:
    """i32[num_rows, W]: rows that ask for everything there is, greedy ones and plain ones."""
    rng = np.random.default_rng(3)
    state = np.zeros((num_rows, SlotLayout.width(2)), np.int32)

    def fill(name: str, values: object, dtype: type = np.float32) -> None:
        values = np.asarray(values, dtype)
        start = SlotLayout.at(name)
        wide = values[:, None] if values.ndim == 1 else values
        state[:, start : start + wide.shape[1]] = wide.view(np.int32)

    number = np.arange(num_rows)
    fill("temperature", number % 3 * 0.6)
    fill("top_k", number % 5 * 3, np.int32)
    fill("top_p", np.where(number % 2, 0.8, 1.0))
    fill("min_p", np.where(number % 7, 0, 0.05))
    fill("presence_penalty", np.where(number % 4, 0, 0.7))
    fill("frequency_penalty", number % 3 * 0.4)
    fill("repetition_penalty", np.where(number % 5, 1.0, 1.2))
    fill("seed", rng.integers(0, 2**31, (num_rows, 2)), np.uint32)
    fill("num_bias", number % 3, np.int32)
    fill("bias_ids", rng.permuted(np.tile(np.arange(VOCAB), (num_rows, 1)), axis=1)[:, :2], np.int32)
    fill("bias_values", np.tile([2.5, -3.0], (num_rows, 1)))
    fill("min_kv_len", number % 2 * 1000, np.int32)
    fill("num_stop_ids", np.full(num_rows, 2), np.int32)
    fill("stop_ids", np.tile([3, 9], (num_rows, 1)), np.int32)
    fill("wants_logprobs", number % 2, np.int32)
    fill("logprob_token_ids", np.tile([7, 1, 4], (num_rows, 1)), np.int32)
    fill("wants_sampled_logprobs", number % 3 == 0, np.int32)
    fill("has_mask", number % 4 == 1, np.int32)
    return state


@pytest.mark.parametrize(("num_rows", "num_emitting"), [(2 * ROWS, 2 * ROWS), (2 * ROWS + 5, ROWS + 3)])
@pytest.mark.parametrize("mode", [LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS])
def test_tokens_are_those_of_all_rows_at_once(num_rows, num_emitting, mode):
    rng = np.random.default_rng(num_rows)
    emits = np.arange(num_rows) < num_emitting
    emits[1] = False
    rows = StepRows(
        slots=jnp.asarray(np.where(np.arange(num_rows) < num_emitting, rng.permutation(SLOTS)[:num_rows], SLOTS)),
        state=jnp.asarray(mixed_state(num_rows)),
        starts=jnp.arange(num_rows + 1, dtype=jnp.int32),
        past=jnp.arange(num_rows, dtype=jnp.int32),
        kv_lens=jnp.arange(num_rows, dtype=jnp.int32) + 1,
        emits=jnp.asarray(emits),
    )
    logits = (3 * rng.normal(size=(num_rows, VOCAB))).astype(np.float32)
    history = rng.integers(0, 2, (SLOTS, VOCAB)).astype(np.int32)
    masks = rng.integers(0, 2**32, (SLOTS, num_mask_words(VOCAB)), dtype=np.uint32).view(np.int32)

    def run(in_blocks: bool):
        split = VocabSplit(VOCAB, in_blocks=in_blocks)
        return jax.tree.map(np.asarray, jax.jit(partial(draw, split, mode=mode))(logits, history, masks, rows))

    (tokens, found, counted), (expected, expected_found, expected_counted) = run(True), run(False)
    np.testing.assert_array_equal(tokens[emits], expected[emits])
    np.testing.assert_array_equal(counted, expected_counted)
    assert (counted != history).any(axis=1).sum() > 3
    assert found.keys() == expected_found.keys()
    for name, values in found.items():
        np.testing.assert_allclose(values[emits], expected_found[name][emits], atol=1e-5, err_msg=name)
