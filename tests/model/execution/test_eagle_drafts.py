"""Drafts of EAGLE heads: the tokens are those without them, and each draft is that of a head that has read the whole
text with the model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from batcher.slots import SlotLayout
from batcher.step import PackedLayout, StepHandle, StepInput
from model.eagle_config import EagleConfig, EagleForm
from model.execution.memory_plan import RunnerConfig, memory_needs
from model.execution.runner import ModelRunner
from model.loading.eagle_head import random_head
from model.loading.weights import random_weights
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.network.sharding import make_mesh
from tests.model.dense_attention import causal_attention
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
    assert_same_outputs,
    outputs_in_trouble,
    requests,
    tokens_of,
    warm_runner,
)
from tests.model.execution.drafting import serve as serve_with_cost

pytestmark = pytest.mark.slow

serve = partial(serve_with_cost, draft_cost=1e-6)  # drafts are taken even if few of them are right
TWO = FEW[:2]
FORMS = {
    "eagle": EagleConfig(
        form=EagleForm.EAGLE, layer=replace(TINY, num_layers=1), model_width=32, draft_vocab_size=199, taps=()
    ),
    "eagle3": EagleConfig(
        form=EagleForm.EAGLE3, layer=replace(TINY, num_layers=1), model_width=32, draft_vocab_size=90, taps=(0, 1, 2)
    ),
}


def head(form: str, *, seed: int = 5, mesh=None, config: EagleConfig | None = None) -> EagleHead:
    """Random weights. That of EAGLE-3 drafts the first 90 of the model's tokens, which are all of FEW but the last."""
    head = random_head(config or FORMS[form], dtype=jnp.float32, seed=seed, mesh=mesh)
    nnx.update(head, jax.tree.map(lambda x: x * 10 if x.ndim == 2 else x, nnx.state(head)))
    return head


@pytest.fixture(scope="module")
def runner(request) -> ModelRunner:
    """One of each form. That of EAGLE-3 also draws: how drafts are accepted does not depend on the form."""
    form, buckets = request.param, SAMPLE if request.param == "eagle3" else GREEDY
    draft = head(form), paged_attention()
    runner = warm_runner(tiny_model(), draft=draft, buckets=buckets, draft_pass_tokens=16)
    runner.form = form
    return runner


LADDERS = {"eagle": (GREEDY_PLAIN, GREEDY_DRAFTS), "eagle3": (SAMPLE_PLAIN, SAMPLE_DRAFTS)}  # without drafts, with them


@pytest.mark.parametrize(
    ("runner", "kind"), [("eagle", "greedy"), *(("eagle3", kind) for kind in KINDS)], indirect=["runner"]
)
def test_drafts_of_a_head_change_no_output(runner, kind) -> None:
    without, with_drafts = LADDERS[runner.form]
    asked = requests(KINDS[kind])
    expected, _ = serve(runner, without, asked)
    found, drafted = serve(runner, with_drafts, asked)
    assert_same_outputs(found, expected)
    assert drafted.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("runner", ["eagle3"], indirect=True)
def test_preempted_requests_and_shared_prefixes_leave_the_outputs_as_they_are(runner) -> None:
    assert outputs_in_trouble(serve, runner, LADDERS[runner.form]).num_accepted_tokens > 0


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


ALL = range(199)


@pytest.mark.parametrize(
    ("runner", "among", "preempts_every"),
    [("eagle", ALL, None), ("eagle", ALL, 5), ("eagle3", ALL, None), ("eagle3", TWO, None), ("eagle3", TWO, 5)],
    indirect=["runner"],
)
def test_each_draft_is_that_of_a_head_that_has_read_the_whole_text(runner, among, preempts_every, monkeypatch) -> None:
    """A prompt in two chunks, rows over many pages, and requests computed again from a cached prefix. The drafts are in
    the pages' text, right or wrong."""
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
    asked = requests([options], prompt_len=30, max_tokens=60)
    monkeypatch.setattr(runner, "execute", spy)
    found, stats = serve(runner, LADDERS[runner.form][1], asked, preempts_every=preempts_every)
    text = [*asked[0].prompt, *tokens_of(found["0"])]
    reader = Reader(tiny_model(), head(runner.form), text)
    within = [step for step in steps if step[0] < len(text)]  # not of steps that began behind the end
    for past, drafts, _ in within:
        assert drafts == reader.drafts(past, len(drafts), among)
    if among is TWO:
        accepted = {num_accepted for *_, num_accepted in within}
        assert min(accepted) == 0 < max(accepted)
    else:
        assert len({token for _, drafts, _ in within for token in drafts}) > 4
    assert preempts_every is None or stats.num_preemptions > 2


@pytest.mark.parametrize("form", FORMS)
def test_a_head_is_split_over_the_chips_as_the_model_is(form) -> None:
    """Two chips, and one KV head of the head, which each of them has."""
    mesh, layer = make_mesh(2), replace(TINY, vocab_size=200)
    model = random_weights(layer, dtype=jnp.float32, mesh=mesh)
    nnx.update(model, jax.tree.map(lambda x: x * 10 if x.ndim == 2 else x, nnx.state(model)))
    sizes = {"layer": replace(layer, num_layers=1, num_kv_heads=1)}
    if form == "eagle":
        sizes["draft_vocab_size"] = 200
    split = head(form, mesh=mesh, config=replace(FORMS[form], **sizes))
    attention, own = paged_attention(layer, mesh=mesh), paged_attention(split.config, mesh=mesh)
    runner = warm_runner(model, attention, draft=(split, own), buckets=GREEDY, draft_pass_tokens=16)
    assert runner.state.draft.features.sharding.shard_shape((1, 8, 32)) == (1, 8, 16)
    asked = requests(KINDS["greedy"])
    expected, _ = serve(runner, GREEDY_PLAIN, asked)
    found, stats = serve(runner, GREEDY_DRAFTS, asked)
    assert_same_outputs(found, expected)
    assert stats.speculation.num_draft_tokens > 0


def test_the_memory_plan_counts_the_head_its_pages_and_the_features() -> None:
    model, attention, limits = tiny_model(), paged_attention(), RunnerConfig(**LIMITS)
    alone = memory_needs(model, attention, limits)
    both = memory_needs(model, attention, limits, (head("eagle3"), attention))
    page_size = attention.spec.page_size
    own = alone.page // TINY.num_layers
    assert both.page == alone.page + own + 4 * page_size + 4 + 4 * 32 * page_size
    assert both.weights - alone.weights == sum(x.nbytes for x in jax.tree.leaves(nnx.state(head("eagle3"))))
