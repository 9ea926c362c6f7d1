"""Requests whose texts repeat themselves, served with drafts and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.request import Request, RequestOutput, SamplingParams
from batcher.stats import EngineStats, SpeculationCounts
from batcher.step import Bucket, Variant
from model.compiling.compile_cache import keep_compilations
from model.eagle_config import EagleConfig, EagleForm
from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from model.loading.eagle_head import random_head
from model.network.eagle import EagleHead
from model.network.llama import Llama
from pallas_kernels.api import PagedAttention
from tests.batcher.harness import after_weights
from tests.conftest import COMPILED
from tests.model.driver import TINY, dense_logits, paged_attention, tiny_model

keep_compilations(COMPILED)  # JAX's own cache, in which this process would keep them, is none of the store's
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 96, "num_pages": 64}  # of a runner
_BUCKETS = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "min_decode_rows": 4, "min_mixed_tokens": 24}
_WITH_DRAFTS = _BUCKETS | {"num_drafts": 3, "max_draft_rows": 4}


class GreedyLadder(BucketLadder):
    """For greedy requests only. Its mixed steps draw nothing, so they compile sooner."""

    def choose(self, num_tokens: int, num_rows: int, *, variant: Variant, **step: bool) -> Bucket:
        assert variant is Variant.GREEDY
        return replace(super().choose(num_tokens, num_rows, variant=variant, **step), variant=variant)


class SampleLadder(BucketLadder):
    """Greedy requests take the programs of those that draw, too, so there are half as many."""

    def choose(self, num_tokens: int, num_rows: int, *, variant: Variant, **step: bool) -> Bucket:
        assert variant in (Variant.GREEDY, Variant.SAMPLE)
        return super().choose(num_tokens, num_rows, variant=Variant.SAMPLE, **step)

    def choose_drafts(self, num_rows: int, variant: Variant, **step: bool) -> Bucket | None:
        return super().choose_drafts(num_rows, Variant.SAMPLE, **step)


_LADDERS = (BucketLadder, GreedyLadder, SampleLadder)
PLAIN, GREEDY_PLAIN, SAMPLE_PLAIN = (ladder(BucketConfig(**_BUCKETS)) for ladder in _LADDERS)
DRAFTS, GREEDY_DRAFTS, SAMPLE_DRAFTS = (ladder(BucketConfig(**_WITH_DRAFTS)) for ladder in _LADDERS)
DRAWN = [bucket for bucket in DRAFTS.buckets() if not bucket.variant.scores]
GREEDY, SAMPLE = (
    sorted({replace(bucket, variant=variant) for bucket in DRAWN}) for variant in (Variant.GREEDY, Variant.SAMPLE)
)
FEW = (3, 17, 44, 90)  # allowed tokens: a text of four different ones repeats itself


ONE_LAYER = replace(TINY, num_layers=1)
_HEAD = {"layer": ONE_LAYER, "model_width": 32}
HEADS = {
    "eagle": EagleConfig(form=EagleForm.EAGLE, draft_vocab_size=199, taps=(), **_HEAD),
    "eagle3": EagleConfig(form=EagleForm.EAGLE3, draft_vocab_size=90, taps=(0, 1, 2), **_HEAD),
}


def ten_times_as_large(model: Any) -> Any:
    """Its kernels, so that tokens depend on what was attended to."""
    nnx.update(model, jax.tree.map(lambda x: x * 10 if x.ndim == 2 else x, nnx.state(model)))
    return model


def head(form: str, *, seed: int = 5, mesh: Any = None, config: EagleConfig | None = None) -> EagleHead:
    """Random weights. That of EAGLE-3 drafts the first 90 of the model's tokens, which are all of FEW but the last."""
    return ten_times_as_large(random_head(config or HEADS[form], dtype=jnp.float32, seed=seed, mesh=mesh))


@cache
def near(share: float) -> Llama:
    """A model of one layer with other weights added: it agrees with `near(0.0)` at times."""
    model, other = tiny_model(config=ONE_LAYER), tiny_model(seed=1, config=ONE_LAYER)
    mixed = jax.tree.map(lambda x, y: (1 - share) * x + share * y, nnx.state(model), nnx.state(other))
    nnx.update(model, mixed)
    return model


def warm_runner(
    model: Llama,
    attention: PagedAttention | None = None,
    *,
    draft: tuple[Llama | EagleHead, PagedAttention] | None = None,
    buckets: Sequence[Bucket] = DRAWN,
    **config: Any,
) -> ModelRunner:
    """A runner of the model within `LIMITS`, for all steps of `PLAIN` and `DRAFTS` that score no prompt, or for those
    of `GREEDY` or `SAMPLE`."""
    limits, attention = RunnerConfig(**LIMITS, **config), attention or paged_attention()
    runner = ModelRunner(model, attention, limits, draft=draft, program_folder=COMPILED)
    runner.warm_up(buckets, lambda line: None)
    return runner


def serve(
    runner: ModelRunner,
    ladder: BucketLadder,
    requests: list[Request],
    *,
    preempts_every: int | None = None,
    weights_cost_tokens: float = 1000.0,
    draft_cost: float = 0.0,
) -> tuple[dict, EngineStats]:
    """(request id -> its outputs joined, the statistics)."""
    runner.recover()  # each run begins with an empty device
    step_times = after_weights(weights_cost_tokens)
    config = EngineConfig(eos_token_ids=(1,), seed=0, step_times=step_times, draft_cost=draft_cost)
    engine = Engine(runner, config, ladder)
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    compiles = runner.num_compiles
    for request in requests:
        engine.add_request(request, lambda output: outputs[output.request_id].append(output))
    scheduler, num_rounds = engine.core.scheduler, 0
    while engine.step() or engine.core.in_flight:
        num_rounds += 1
        if preempts_every and num_rounds % preempts_every == 0 and scheduler.running:
            scheduler.preempt(scheduler.running[-1])
    engine.core.check_integrity()
    assert engine.stats().integrity_failures == 0
    assert runner.num_compiles == compiles
    return outputs, engine.stats()


def outputs_in_trouble(
    serve: Callable, runner: ModelRunner, ladders: tuple[BucketLadder, BucketLadder] = (PLAIN, DRAFTS)
) -> SpeculationCounts:
    """AssertionError if drafts change the outputs of requests that are preempted or whose prompt was served before.

    Returns the counts of drafts.

    Args:
        serve: that of this file, its costs set.
        ladders: without drafts, and with them.
    """
    without, with_drafts = ladders
    asked = requests([{"temperature": 1.0, "allowed_token_ids": FEW}] * 6, prompt_len=30, max_tokens=60)
    asked.append(replace(asked[0], request_id="the same prompt"))
    expected, _ = serve(runner, without, asked)
    found, stats = serve(runner, with_drafts, asked, preempts_every=7)
    assert stats.num_preemptions > 3
    assert stats.prefix_cache_hits > 0
    assert_same_outputs(found, expected)
    return stats.speculation


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    assert outputs[-1].error is None
    return [token for output in outputs for token in output.token_ids]


def scores_of(outputs: list[RequestOutput]) -> list[float]:
    raw = [x for output in outputs for entry in output.logprobs for x in (entry.logprob, *entry.top_logprobs)]
    return raw + [x for output in outputs for x in output.sampled_logprobs]


def requests(sampling: list[dict], *, prompt_len: int = 20, max_tokens: int = 40) -> list[Request]:
    rng = np.random.default_rng(7)
    made = []
    for i, options in enumerate(sampling):
        pattern = rng.choice(FEW, 5)
        prompt = np.tile(pattern, prompt_len)[:prompt_len]
        options = {"max_tokens": max_tokens, "temperature": 0.0, "seed": i, "ignore_eos": True} | options
        made.append(Request(request_id=str(i), prompt=tuple(prompt.tolist()), sampling=SamplingParams(**options)))
    return made


KINDS = {
    "greedy": [{}] * 4,
    "sampled": [{"temperature": 1.0, "allowed_token_ids": FEW[: 2 + i]} for i in range(3)],
    "top-p and min-p": [
        {"temperature": 3.0, "allowed_token_ids": FEW, "sampled_logprobs": True} | cut
        for cut in ({"top_p": 0.7}, {"min_p": 0.1, "top_k": 3})
    ],
    "penalties": [
        {"temperature": t, "allowed_token_ids": FEW, "presence_penalty": 0.5, "frequency_penalty": f, "logprobs": 2}
        | {"sampled_logprobs": True}
        for t in (0.0, 1.0)
        for f in (-0.5, 0.3)
    ],
    "repetition": [{"repetition_penalty": r, "allowed_token_ids": FEW} for r in (0.5, 1.3)],
    "bias": [{"logit_bias": ((3, 30.0), (17, 29.0)), "temperature": 1.0}] * 2,
    "minimum": [
        {"allowed_token_ids": FEW, "stop_token_ids": (3, 17), "min_tokens": n, "temperature": 1.0} for n in (0, 9, 25)
    ],
    "logprobs": [{"logprobs": 3, "allowed_token_ids": FEW}, {"temperature": 1.0, "allowed_token_ids": FEW}],
}


def assert_same_outputs(found: dict[str, list[RequestOutput]], expected: dict[str, list[RequestOutput]]) -> None:
    """Tokens and ends are equal. Log-probabilities come from programs of other shapes, so they are near."""
    assert found.keys() == expected.keys()
    for name, outputs in expected.items():
        assert tokens_of(found[name]) == tokens_of(outputs)
        assert found[name][-1].finish_reason == outputs[-1].finish_reason
        np.testing.assert_allclose(scores_of(found[name]), scores_of(outputs), atol=2e-4)


def assert_distribution_of(
    model: Llama, serve: Callable, runner: ModelRunner, temperature: float = 6.0, ladder: BucketLadder = DRAFTS
) -> None:
    """Chi-square of the second to fourth tokens after a fixed prompt, over many seeds, against the probabilities that
    the model's logits give, in float64. They are drawn against drafts, of which many are right and many are wrong.

    Args:
        serve: that of this file, its costs set.
        temperature: the lower it is, the more do models differ. Each text is still expected a few times.
    """
    from scipy import stats as statistics  # takes a second, which every process would spend that collects tests

    prompt, allowed = (3, 17, 3, 17, 3), FEW[:3]
    options = {"max_tokens": 4, "temperature": temperature, "allowed_token_ids": allowed, "ignore_eos": True}
    asked = [
        Request(request_id=str(seed), prompt=prompt, sampling=SamplingParams(seed=seed, **options))
        for seed in range(600)
    ]
    outputs, stats = serve(runner, ladder, asked)
    counts = stats.speculation
    assert 50 < counts.num_accepted_tokens < counts.num_draft_tokens - 50, counts
    expected: Counter[tuple[int, ...]] = Counter()
    for text in product(allowed, repeat=4):
        logits = dense_logits(model, [*prompt, *text[:3]])[-4:, list(allowed)].astype(np.float64) / temperature
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances = weights / weights.sum(axis=1, keepdims=True)
        expected[text[1:]] += len(asked) * np.prod([chances[i, allowed.index(x)] for i, x in enumerate(text)])
    drawn = Counter(tuple(tokens_of(output)[1:]) for output in outputs.values())
    assert drawn.keys() <= expected.keys()
    assert min(expected.values()) > 4  # the test asks for some of each
    assert statistics.chisquare([drawn[text] for text in expected], list(expected.values())).pvalue > 0.001
