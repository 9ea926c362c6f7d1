"""Several steps in one program: the tokens of as many programs, whichever rows stop before others."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batcher.grammar import num_mask_words
from batcher.request import SamplingParams
from batcher.slots import SlotLayout
from batcher.step import Bucket, PackedLayout, StepOutput, Variant
from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from model.network.sharding import abstract_model, make_mesh
from tests.model.driver import TINY, Row, pack, paged_attention, run, tiny_runner

PROMPT = Bucket(24, 4, Variant.SAMPLE)
MOST = 5
SAMPLED = SamplingParams(
    max_tokens=64,
    temperature=1.2,
    top_p=0.9,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    logprobs=3,
    sampled_logprobs=True,
)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    made = tiny_runner()
    singles = [Bucket(4, 4, variant) for variant in (Variant.GREEDY, Variant.SAMPLE)]
    made.warm_up([PROMPT, *singles, *(several(b) for b in singles)], print)
    return made


def several(bucket: Bucket) -> Bucket:
    return Bucket(bucket.num_tokens, bucket.num_rows, bucket.variant, num_steps=MOST)


def rows(variant: Variant) -> list[Row]:
    greedy = [Row(0, [5, 6, 7, 8, 9], [1, 2, 3]), Row(2, [3, 1, 4], [7, 8, 9])]
    if variant is Variant.GREEDY:
        return greedy
    mask = np.full(num_mask_words(TINY.vocab_size), 0x5A5A5A5A, np.int32)
    return [
        greedy[0],
        Row(3, [8, 8, 2], [4, 5, 6], SAMPLED, seed=11),
        Row(1, [8, 8, 2], [10, 11, 12], SAMPLED, seed=12, mask=mask),
    ]


def draw_several(runner: ModelRunner, bucket: Bucket, counts: list[tuple[Row, int]]) -> StepOutput:
    capacity = runner.capacity()
    width = SlotLayout.width(capacity.pages_per_seq)
    step = pack(bucket, [(row, 1) for row, _ in counts], num_slots=capacity.num_slots, width=width)
    step.packed[PackedLayout(bucket).sections()["q_lens"]][: len(counts)] = [count for _, count in counts]
    output = runner.execute(step).result()
    for i, (row, count) in enumerate(counts):
        row.num_computed += count
        row.output += output.tokens[i, :count].tolist()
    return output


@pytest.mark.parametrize("variant", [Variant.GREEDY, Variant.SAMPLE])
def test_the_tokens_are_those_of_single_steps(runner, variant) -> None:
    single = Bucket(4, 4, variant)
    plain, packed = rows(variant), rows(variant)
    logprobs: list[list[np.ndarray]] = []
    for each in (plain, packed):
        run(runner, PROMPT, [(row, len(row.prompt)) for row in each], admit=each)
        if each is plain:
            outputs = [run(runner, single, [(row, 1) for row in each]) for _ in range(3 * MOST + 1)]
            if variant is Variant.SAMPLE:
                logprobs.append([[x.logprobs[1], x.sampled_logprobs[1]] for x in outputs[:MOST]])
            continue
        first = draw_several(runner, several(single), [(row, MOST) for row in each])
        assert first.finite.shape == first.tokens.shape == (4, MOST)
        assert first.finite[: len(each)].all()
        if variant is Variant.SAMPLE:
            logprobs.append(list(np.stack([first.logprobs[1], first.sampled_logprobs[1]], axis=1)[:, :, None]))
        # Some rows stop before others; then all go on, one by one and together.
        draw_several(runner, several(single), [(row, count) for row, count in zip(each, (2, 1, MOST), strict=False)])
        run(runner, single, [(row, 1) for row in each])
        draw_several(runner, several(single), [(row, 4) for row in each])
    for a, b in zip(plain, packed, strict=True):
        assert len(b.output) > 2 * MOST
        assert b.output == a.output[: len(b.output)]
    if variant is Variant.SAMPLE:
        np.testing.assert_allclose(logprobs[0], logprobs[1], atol=1e-5)
        assert (np.array(logprobs[0])[:, 1] < 0).all()


def test_the_state_is_updated_in_place(runner) -> None:
    bucket = several(Bucket(4, 4, Variant.SAMPLE))
    analysis = runner.programs.steps[bucket].memory_analysis()
    state_bytes = sum(leaf.nbytes for leaf in [runner.state.slots, runner.state.history, runner.state.masks])
    assert analysis.alias_size_in_bytes == state_bytes + sum(kv.nbytes for kv in runner.state.kv)
    single = runner.programs.steps[Bucket(4, 4, Variant.SAMPLE)].memory_analysis()
    assert analysis.temp_size_in_bytes < single.temp_size_in_bytes + runner.state.kv[0].nbytes


def test_chips_share_a_program_of_several_steps(two_passes) -> None:
    """They update their parts of the state in place, and the loop brings no copy of the pages."""
    mesh = make_mesh(2)
    model = abstract_model(replace(TINY, vocab_size=200), dtype=jnp.float32, mesh=mesh)
    limits = RunnerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=64, num_pages=400)
    runner = ModelRunner(model, paged_attention(model.config, mesh=mesh), limits)
    analysis = runner.described.step(several(Bucket(4, 4, Variant.SAMPLE))).lower().compile().memory_analysis()
    parts = [math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(runner.described.state_like)]
    assert analysis.alias_size_in_bytes == sum(parts)
    assert analysis.temp_size_in_bytes < max(parts)
