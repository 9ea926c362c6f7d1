"""Drafts of any kind: the tokens are those without them, and programs have room for all that drafts need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from batcher.buckets import BucketLadder
from batcher.slots import SlotLayout
from batcher.stats import EngineStats
from batcher.step import PackedLayout, StepHandle, StepInput
from model.execution.memory_plan import RunnerConfig, memory_needs
from model.execution.prompt_lookup import PromptLookup
from model.execution.runner import ModelRunner
from model.loading.weights import random_weights
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.network.sharding import make_mesh
from tests.model.adapters import random_weights as random_adapter
from tests.model.dense_attention import causal_attention
from tests.model.driver import TINY, paged_attention, tiny_model
from tests.model.execution import drafting

pytestmark = pytest.mark.slow

LADDERS = {
    "lookup": (drafting.PLAIN, drafting.DRAFTS),
    "model": (drafting.SAMPLE_PLAIN, drafting.SAMPLE_DRAFTS),
    # How drafts are accepted does not depend on the form of a head.
    "eagle": (drafting.GREEDY_PLAIN, drafting.GREEDY_DRAFTS),
    "eagle3": (drafting.SAMPLE_PLAIN, drafting.SAMPLE_DRAFTS),
}
# A pass of the draft model costs a little. Drafts of heads are taken even if few of them are right.
COSTS = {"lookup": 0.0, "model": 0.01, "eagle": 1e-6, "eagle3": 1e-6}
TWO, ALL = drafting.FEW[:2], range(199)
Serve = Callable[..., tuple[dict, EngineStats]]


def made(name: str) -> ModelRunner:
    if name == "lookup":
        lookup = PromptLookup(min_tokens=1, max_tokens=3)
        return drafting.warm_runner(tiny_model(), lookup=lookup, max_draft_rows=4, buckets=drafting.DRAWN)
    model = drafting.near(0.0) if name == "model" else tiny_model()
    draft = (model if name == "model" else drafting.head(name)), paged_attention()
    buckets = drafting.GREEDY if name == "eagle" else drafting.SAMPLE
    return drafting.warm_runner(model, draft=draft, buckets=buckets, draft_pass_tokens=16)


@pytest.fixture(scope="module")
def drafter(request: pytest.FixtureRequest) -> tuple[str, ModelRunner, Serve]:
    """The name of a way to draft, a runner that drafts so, and `serve` with its costs."""
    return request.param, made(request.param), partial(drafting.serve, draft_cost=COSTS[request.param])


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("drafter", names, indirect=True)


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [(name, kind) for name in LADDERS for kind in drafting.KINDS if name != "eagle" or kind == "greedy"],
    indirect=["drafter"],
)
def test_drafts_change_no_output(drafter, kind) -> None:
    """Of a draft model: whether it is the model itself, near it, or another one."""
    name, runner, serve = drafter
    without, with_drafts = LADDERS[name]
    expected, alone = serve(runner, without, drafting.requests(drafting.KINDS[kind]))
    assert alone.speculation.num_drafts == 0
    for share in (0.0, 0.2, 1.0) if name == "model" else (None,):
        if share is not None:
            runner.place(drafting.near(0.0), draft=drafting.near(share))
        found, drafted = serve(runner, with_drafts, drafting.requests(drafting.KINDS[kind]))
        drafting.assert_same_outputs(found, expected)
        counts = drafted.speculation
        assert counts.num_draft_tokens > 0
        if name == "lookup":
            assert counts.num_accepted_tokens > 0 and drafted.num_steps < alone.num_steps
        if share == 0.0:
            assert counts.num_accepted_tokens == counts.num_draft_tokens
            assert drafted.num_steps < 0.5 * alone.num_steps


@of("lookup", "model", "eagle3")
def test_preempted_requests_and_those_with_a_cached_prefix_find_their_text_again(drafter) -> None:
    """Each draft of the model itself is right, so each was computed with the K/V of all tokens before it: after
    preemptions, with a cached prefix, and after steps in which the draft model did not run."""
    name, runner, serve = drafter
    if name == "model":
        runner.place(drafting.near(0.0), draft=drafting.near(0.0))
    counts = drafting.outputs_in_trouble(serve, runner, LADDERS[name])
    assert counts.num_accepted_tokens > 0
    assert name != "model" or counts.num_accepted_tokens == counts.num_draft_tokens > 100


@of("lookup", "model")
def test_accepted_and_rejected_drafts_leave_the_distribution_of_the_model(drafter) -> None:
    name, runner, serve = drafter
    if name == "lookup":
        drafting.assert_distribution_of(tiny_model(), serve, runner)
        return
    runner.place(drafting.near(0.0), draft=drafting.near(1.0))
    drafting.assert_distribution_of(drafting.near(0.0), serve, runner, temperature=3.0, ladder=drafting.SAMPLE_DRAFTS)


@of("model")
def test_weights_of_another_draft_model_are_refused(drafter) -> None:
    with pytest.raises(ValueError, match="not the weights"):
        drafter[1].place(drafting.near(0.0))


@pytest.mark.parametrize("name", ["model", *drafting.HEADS])
def test_what_drafts_is_split_over_the_chips_as_the_model_is(name) -> None:
    """Two chips, and one KV head of what drafts, which each of them has. A draft model that is the model is right."""
    mesh, layer = make_mesh(2), replace(drafting.ONE_LAYER if name == "model" else TINY, vocab_size=200)
    if name == "model":
        layer = replace(layer, num_kv_heads=1)
    model = drafting.ten_times_as_large(random_weights(layer, dtype=jnp.float32, mesh=mesh))
    attention = paged_attention(model.config, mesh=mesh)
    draft: Any = (model, attention)
    if name in drafting.HEADS:
        sizes: dict[str, Any] = {"layer": replace(layer, num_layers=1, num_kv_heads=1)}
        sizes |= {"draft_vocab_size": 200} if name == "eagle" else {}
        split = drafting.head(name, mesh=mesh, config=replace(drafting.HEADS[name], **sizes))
        draft = split, paged_attention(split.config, mesh=mesh)
    runner = drafting.warm_runner(model, attention, draft=draft, buckets=drafting.GREEDY, draft_pass_tokens=16)
    if name in drafting.HEADS:
        assert runner.state.draft.features.sharding.shard_shape((1, 8, 32)) == (1, 8, 16)
    serve, asked = partial(drafting.serve, draft_cost=COSTS[name]), drafting.requests(drafting.KINDS["greedy"])
    expected, _ = serve(runner, drafting.GREEDY_PLAIN, asked)
    found, stats = serve(runner, drafting.GREEDY_DRAFTS, asked)
    drafting.assert_same_outputs(found, expected)
    counts = stats.speculation
    assert counts.num_draft_tokens > 0
    assert name != "model" or counts.num_accepted_tokens == counts.num_draft_tokens > 50


def test_the_memory_plan_counts_what_drafts_its_pages_and_the_features() -> None:
    model, attention, limits = tiny_model(), paged_attention(), RunnerConfig(**drafting.LIMITS)
    alone = memory_needs(model, attention, limits)
    both = memory_needs(model, attention, limits, (model, attention))
    page_size = attention.spec.page_size
    assert (both.weights, both.state) == (2 * alone.weights, alone.state)
    assert both.page == 2 * alone.page + 4 * page_size + 4
    both = memory_needs(model, attention, limits, (drafting.head("eagle3"), attention))
    own = alone.page // TINY.num_layers
    assert both.page == alone.page + own + 4 * page_size + 4 + 4 * 32 * page_size
    assert both.weights - alone.weights == sum(x.nbytes for x in jax.tree.leaves(nnx.state(drafting.head("eagle3"))))


def test_rows_with_adapters_have_their_own_tokens_after_drafts_of_the_base_model() -> None:
    """Drafts of a network accept the fewer, the more an adapter changes."""
    ladders = [
        BucketLadder(replace(ladder.config, adapters=True))
        for ladder in (drafting.SAMPLE_PLAIN, drafting.SAMPLE_DRAFTS)
    ]
    buckets = [bucket for bucket in ladders[1].buckets() if not bucket.variant.scores]
    model, attention = drafting.near(0.0), paged_attention()
    adapters = {number: random_adapter(drafting.ONE_LAYER, number) for number in (1, 2)}
    config = RunnerConfig(**drafting.LIMITS, draft_pass_tokens=16, max_loras=2, max_lora_rank=4)
    runner = ModelRunner(model, attention, config, draft=(model, attention), adapter_weights=adapters.__getitem__)
    runner.warm_up(buckets, lambda line: None)
    asked = [
        replace(request, request_id=f"{request.request_id} {adapter}", adapter=adapter)
        for request in drafting.requests([{"temperature": 0, "allowed_token_ids": drafting.FEW}])
        for adapter in (0, 1, 2)
    ]
    expected, _ = drafting.serve(runner, ladders[0], asked, draft_cost=COSTS["model"])
    found, stats = drafting.serve(runner, ladders[1], asked, draft_cost=COSTS["model"])
    drafting.assert_same_outputs(found, expected)
    assert len({tuple(drafting.tokens_of(outputs)) for outputs in found.values()}) == 3
    counts = stats.speculation
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens


class Reader:
    """A head that reads a whole text at once, with the hidden states of one pass of the model."""

    def __init__(self, model: Llama, head: EagleHead, text: list[int]) -> None:
        self.head, self.model, self.text = head, model, np.array(text, np.int32)
        positions = jnp.arange(len(text))
        nothing = [None] * model.config.num_layers
        hidden, _, tapped = model.run(jnp.array(self.text), positions, nothing, causal_attention(), head.eagle.taps)
        self.features = np.asarray(head.features(hidden, tapped))

    def drafts(self, past: int, count: int, among: Sequence[int]) -> list[int]:
        """Those after the token at `past`, each the likeliest of the tokens `among`."""
        size = len(self.text) + count  # one shape for all steps
        read = np.zeros(size, np.int32)
        features = np.zeros((size, self.features.shape[1]), self.features.dtype)
        read[:past], features[:past] = self.text[1 : past + 1], self.features[:past]
        drafts: list[int] = []
        for i in range(count):
            out, logits = map(np.asarray, _read(self.head, self.model, read, features, past - 1 + i))
            drafts.append(among[int(np.argmax(logits[list(among)]))])
            read[past + i], features[past + i] = drafts[-1], out
        return drafts


@nnx.jit
def _read(head: EagleHead, model: Llama, tokens: jax.Array, features: jax.Array, last: int):
    """The head's hidden state f32[D] after token `last`, and the logits f32[V] of what follows."""
    out = head(model, tokens, jnp.arange(len(tokens)), features, None, causal_attention())[0][last]
    logits = head.logits(model, out[None])
    return out, (logits if head.vocabulary is None else head.vocabulary.spread(logits))[0]


@pytest.mark.parametrize(
    ("drafter", "among", "preempts_every"),
    [("eagle", ALL, None), ("eagle", ALL, 5), ("eagle3", ALL, None), ("eagle3", TWO, None), ("eagle3", TWO, 5)],
    indirect=["drafter"],
)
def test_each_draft_is_that_of_a_head_that_has_read_the_whole_text(drafter, among, preempts_every, monkeypatch) -> None:
    """A prompt in two chunks, rows over many pages, and requests computed again from a cached prefix. The drafts are in
    the pages' text, right or wrong."""
    name, runner, serve = drafter
    execute, page_size, steps = runner.execute, 8, []

    def spy(step: StepInput) -> StepHandle:
        if not step.bucket.num_drafts:
            return execute(step)
        slot = step.packed[PackedLayout(step.bucket).sections()["slots"]][0]
        past = int(np.asarray(runner.state.slots)[slot, SlotLayout.KV_LEN])
        handle = execute(step)
        output, text = handle.result(), np.asarray(runner.state.text)
        pages = np.asarray(runner.state.slots)[slot, SlotLayout.PAGE_TABLE :]
        places = past + 1 + np.arange(output.num_drafts[0])
        drafts = text[pages[places // page_size], places % page_size]
        steps.append((past, drafts.tolist(), int(output.num_accepted[0])))
        return handle

    options = {"allowed_token_ids": TWO} if among is TWO else {}
    asked = drafting.requests([options], prompt_len=30, max_tokens=60)
    monkeypatch.setattr(runner, "execute", spy)
    found, stats = serve(runner, LADDERS[name][1], asked, preempts_every=preempts_every)
    text = [*asked[0].prompt, *drafting.tokens_of(found["0"])]
    reader = Reader(tiny_model(), drafting.head(name), text)
    within = [step for step in steps if step[0] < len(text)]  # not of steps that began behind the end
    for past, drafts, _ in within:
        assert drafts == reader.drafts(past, len(drafts), among)
    if among is TWO:
        accepted = {num_accepted for *_, num_accepted in within}
        assert min(accepted) == 0 < max(accepted)
    else:
        assert len({token for _, drafts, _ in within for token in drafts}) > 4
    assert preempts_every is None or stats.num_preemptions > 2
