"""Drafts of a second model: the tokens are those without it, and it has read all the tokens that it builds on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from batcher.buckets import BucketLadder
from batcher.slots import SlotLayout
from batcher.stats import EngineStats
from model.execution import draft_pages
from model.execution.memory_plan import RunnerConfig, memory_needs
from model.execution.rows import StepRows
from model.execution.runner import ModelRunner
from model.loading.weights import random_weights
from model.network.llama import Llama
from model.network.sharding import make_mesh
from tests.model.adapters import random_weights as random_adapter
from tests.model.driver import TINY, paged_attention, tiny_model
from tests.model.execution.drafting import (
    FEW,
    GREEDY,
    GREEDY_DRAFTS,
    GREEDY_PLAIN,
    KINDS,
    LIMITS,
    SAMPLE,
    SAMPLE_DRAFTS,
    SAMPLE_PLAIN,
    assert_distribution_of,
    assert_same_outputs,
    outputs_in_trouble,
    requests,
    tokens_of,
    warm_runner,
)
from tests.model.execution.drafting import serve as serve_with_cost

pytestmark = pytest.mark.slow

ONE_LAYER = replace(TINY, num_layers=1)
serve = partial(serve_with_cost, draft_cost=0.01)  # of a pass of the draft model


@cache
def near(share: float) -> Llama:
    """The model with other weights added: it agrees with the model at times."""
    model, other = tiny_model(config=ONE_LAYER), tiny_model(seed=1, config=ONE_LAYER)
    mixed = jax.tree.map(lambda x, y: (1 - share) * x + share * y, nnx.state(model), nnx.state(other))
    nnx.update(model, mixed)
    return model


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return warm_runner(near(0.0), draft=(near(0.0), paged_attention()), buckets=SAMPLE, draft_pass_tokens=16)


@pytest.fixture(scope="module")
def plain(runner) -> Callable[[str], tuple[dict, EngineStats]]:
    """What `serve` says of a kind of requests without drafts, whatever the draft model."""
    return cache(lambda kind: serve(runner, SAMPLE_PLAIN, requests(KINDS[kind])))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_drafts_of_any_model_change_no_output(runner, plain, kind, share) -> None:
    runner.place(near(0.0), draft=near(share))
    expected, alone = plain(kind)
    found, drafted = serve(runner, SAMPLE_DRAFTS, requests(KINDS[kind]))
    assert_same_outputs(found, expected)
    counts = drafted.speculation
    assert counts.num_draft_tokens > 0
    if share == 0.0:
        assert counts.num_accepted_tokens == counts.num_draft_tokens
        assert drafted.num_steps < 0.5 * alone.num_steps


def test_accepted_and_rejected_drafts_leave_the_distribution_of_the_model(runner) -> None:
    runner.place(near(0.0), draft=near(1.0))
    assert_distribution_of(near(0.0), serve, runner, temperature=3.0, ladder=SAMPLE_DRAFTS)


def test_a_draft_of_the_model_itself_has_read_every_token(runner) -> None:
    """Each draft is right, so each was computed with the K/V of all tokens before it: after preemptions, with a cached
    prefix, and after steps in which the draft model did not run."""
    runner.place(near(0.0), draft=near(0.0))
    counts = outputs_in_trouble(serve, runner, (SAMPLE_PLAIN, SAMPLE_DRAFTS))
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 100


def test_a_draft_model_is_split_over_the_chips_as_the_model_is() -> None:
    """Two chips, and one KV head of the draft model, which each of them has. Its drafts are right: it is the model."""
    mesh, config = make_mesh(2), replace(ONE_LAYER, vocab_size=200, num_kv_heads=1)
    model = random_weights(config, dtype=jnp.float32, mesh=mesh)
    nnx.update(model, jax.tree.map(lambda x: x * 10 if x.ndim == 2 else x, nnx.state(model)))
    attention = paged_attention(model.config, mesh=mesh)
    runner = warm_runner(model, attention, draft=(model, attention), buckets=GREEDY, draft_pass_tokens=16)
    asked = requests(KINDS["greedy"])
    expected, _ = serve(runner, GREEDY_PLAIN, asked)
    found, stats = serve(runner, GREEDY_DRAFTS, asked)
    assert_same_outputs(found, expected)
    assert stats.speculation.num_accepted_tokens == stats.speculation.num_draft_tokens > 50


def test_lengths_of_what_the_draft_model_has_read() -> None:
    state = np.zeros((3, SlotLayout.width(3)), np.int32)
    state[:, SlotLayout.PAGE_TABLE :] = [[1, 2, 3], [4, 5, 6], [7, 0, 0]]
    rows = StepRows(
        slots=jnp.arange(3),
        state=jnp.array(state),
        starts=jnp.array([0, 2, 3, 3]),
        past=jnp.array([10, 3, 4]),
        kv_lens=jnp.array([12, 4, 4]),
        emits=jnp.array([True, True, False]),
    )
    filled = jnp.array([0, 4, 4, 1, 2, 4, 0, 4])
    # Full pages up to the first that is not; not more than the row's own tokens.
    assert draft_pages.lengths(filled, rows, 4).tolist() == [9, 2, 4]
    # The first row writes positions 10 and 11, the second one position 3.
    taken = draft_pages.take_back(filled.at[3].set(3), rows, jnp.array([10, 11, 3, 0]), 4)
    assert taken.tolist() == [0, 4, 4, 2, 2, 4, 0, 4]
    assert draft_pages.fill(taken, jnp.array([3, 8]), jnp.array([2, 0])).tolist() == [0, 4, 4, 3, 2, 4, 0, 4]


def test_the_memory_plan_counts_the_draft_model_and_its_pages() -> None:
    model, attention, limits = tiny_model(), paged_attention(), RunnerConfig(**LIMITS)
    alone = memory_needs(model, attention, limits)
    both = memory_needs(model, attention, limits, (model, attention))
    assert both.weights == 2 * alone.weights
    assert both.page == 2 * alone.page + 4 * attention.spec.page_size + 4
    assert both.state == alone.state


def test_weights_of_another_draft_model_are_refused(runner) -> None:
    with pytest.raises(ValueError, match="not the weights"):
        runner.place(near(0.0))


def test_rows_with_adapters_have_their_own_tokens_after_drafts_of_the_base_model() -> None:
    """Drafts of a network accept the fewer, the more an adapter changes."""
    ladders = [BucketLadder(replace(ladder.config, adapters=True)) for ladder in (SAMPLE_PLAIN, SAMPLE_DRAFTS)]
    buckets = [bucket for bucket in ladders[1].buckets() if not bucket.variant.scores]
    model, attention = near(0.0), paged_attention()
    adapters = {number: random_adapter(ONE_LAYER, number) for number in (1, 2)}
    config = RunnerConfig(**LIMITS, draft_pass_tokens=16, max_loras=2, max_lora_rank=4)
    runner = ModelRunner(model, attention, config, draft=(model, attention), adapter_weights=adapters.__getitem__)
    runner.warm_up(buckets, lambda line: None)
    asked = [
        replace(request, request_id=f"{request.request_id} {adapter}", adapter=adapter)
        for request in requests([{"temperature": 0, "allowed_token_ids": FEW}])
        for adapter in (0, 1, 2)
    ]
    expected, _ = serve(runner, ladders[0], asked)
    found, stats = serve(runner, ladders[1], asked)
    assert_same_outputs(found, expected)
    assert len({tuple(tokens_of(outputs)) for outputs in found.values()}) == 3
    counts = stats.speculation
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
