"""The compiled step, driven by hand: whatever the schedule, the tokens are those of one dense pass over the text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.request import MAX_LOGPROBS, SamplingParams
from batcher.step import Bucket, Variant
from model.execution import step
from model.loading.weights import random_weights
from model.network.packed import pack_for_cpu
from model.sampling import sampling
from pallas_kernels.api import PagedAttention
from pallas_kernels.cpu import library
from pallas_kernels.spec import Backend, RaggedBatch
from tests.c_compiler import NATIVE, compiler
from tests.examples import examples
from tests.model.dense_attention import causal_attention
from tests.model.driver import TINY, Row, paged_attention, run, tiny_model, tiny_runner

NUM_SLOTS = 4
DECODE = [Bucket(NUM_SLOTS, NUM_SLOTS, variant) for variant in (Variant.GREEDY, Variant.SAMPLE)]
MIXED = [Bucket(24, NUM_SLOTS, variant) for variant in (Variant.GREEDY, Variant.SAMPLE, Variant.SCORE)]
MAX_LEN = 64


@cache
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def runner():
    made = tiny_runner(model(), max_num_seqs=NUM_SLOTS, max_model_len=MAX_LEN, num_pages=40)
    made.warm_up([*DECODE, *MIXED], lambda line: None)
    return made


@cache
def dense_pass():
    def logits(tokens):
        hidden, _ = model()(tokens, jnp.arange(MAX_LEN), [None] * TINY.num_layers, causal_attention())
        return model().logits(hidden)

    return jax.jit(logits)


def dense_logits(tokens):
    """f32[len(tokens), V]: padding after the text changes nothing before it."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(dense_pass()(padded))[: len(tokens)]


def is_greedy(prompt, output):
    """Whether each token is the most likely one after those before it: by induction, greedy decoding's text."""
    best = dense_logits([*prompt, *output]).argmax(-1)
    return best[len(prompt) - 1 : -1].tolist() == output


def greedy(**options):
    return SamplingParams(max_tokens=64, temperature=0, **options)


# Paged, chunked, batched, preempted: the same tokens


@settings(max_examples=examples(24), derandomize=True)
@given(st.data())
def test_any_schedule_gives_the_tokens_of_a_dense_pass(runner, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    wanted = 6
    waiting = [list(rng.integers(0, TINY.vocab_size, rng.integers(1, 40))) for _ in range(rng.integers(1, 7))]
    prompts, finished, running = [list(map(int, p)) for p in waiting], {}, {}
    pages = list(rng.permutation(np.arange(1, 41)))
    queue = [(i, prompt, []) for i, prompt in enumerate(prompts)]
    while queue or running:
        admit = []
        for slot in rng.permutation(NUM_SLOTS):
            needed = -(-MAX_LEN // 8)
            if queue and slot not in running and len(pages) >= needed and rng.random() < 0.7:
                index, prompt, output = queue.pop(0)
                row = Row(int(slot), prompt, [pages.pop() for _ in range(needed)], greedy(), output=list(output))
                running[int(slot)] = index, row
                admit.append(row)
        chunks, budget = [], 24
        for _, row in running.values():
            left = len(row.tokens) - row.num_computed
            count = left if rng.random() < 0.5 else int(rng.integers(0, left + 1))
            count = max(min(count, budget), 1 if row in admit else 0)  # a row is admitted with its first tokens
            if count:
                chunks.append((row, count))
                budget -= count
        if not chunks or budget < 0:
            for row in admit:  # no room in this step after all
                index, _ = running.pop(row.slot)
                queue.append((index, row.prompt, row.output))
                pages += row.pages
            continue
        decodes_only = all(count == 1 for _, count in chunks)
        bucket = (DECODE if decodes_only and rng.random() < 0.8 else MIXED)[int(rng.integers(2))]
        run(runner, bucket, chunks, admit=admit, from_host=bool(rng.random() < 0.2))
        for slot, (index, row) in list(running.items()):
            is_done = len(row.output) >= wanted
            is_preempted = not is_done and rng.random() < 0.1
            if is_done or is_preempted:
                del running[slot]
                pages += row.pages
            if is_done:
                finished[index] = row.output
            if is_preempted:
                queue.append((index, row.prompt, row.output))
    for index, prompt in enumerate(prompts):
        assert len(finished[index]) == wanted
        assert is_greedy(prompt, finished[index])


# Sampling in the step


def sampled_text(runner, bucket_rows, neighbours):
    """12 tokens of one sampled request, with so many others in the step."""
    asked = SamplingParams(max_tokens=64, temperature=1.3, top_p=0.95, top_k=50, presence_penalty=0.3, logprobs=2)
    row = Row(1, [9, 8, 7], [1, 2], asked, seed=(7 << 32) + 5)
    others = [
        Row(
            slot,
            [3 + slot] * slot,
            [4 + 2 * slot, 5 + 2 * slot],
            SamplingParams(max_tokens=9, temperature=0.5),
            seed=slot,
        )
        for slot in (2, 3)
    ][:neighbours]
    rows = [row, *others]
    run(runner, MIXED[1], [(r, len(r.prompt)) for r in rows], admit=rows)
    for _ in range(11):
        run(runner, bucket_rows, [(r, 1) for r in rows])
    return row.output


def test_a_sampled_text_does_not_depend_on_its_batch(runner):
    alone = sampled_text(runner, DECODE[1], neighbours=0)
    assert len(set(alone)) > 3
    assert sampled_text(runner, DECODE[1], neighbours=2) == alone
    assert sampled_text(runner, MIXED[1], neighbours=2) == alone  # another program


def test_penalties_count_what_the_step_itself_has_drawn(runner):
    """A frequency penalty so strong that no token comes twice, until a preemption and after."""
    row = Row(0, [4, 5], [6, 7, 8], greedy(frequency_penalty=100.0))
    run(runner, MIXED[1], [(row, 2)], admit=[row])
    for _ in range(6):
        run(runner, DECODE[1], [(row, 1)])
    again = Row(3, row.prompt, [9, 10, 11], row.sampling, output=list(row.output))
    run(runner, MIXED[1], [(again, len(again.tokens))], admit=[again])  # recomputed in another slot
    for _ in range(6):
        run(runner, DECODE[1], [(again, 1)])
    assert again.output[: len(row.output)] == row.output
    assert len(set(again.output)) == len(again.output) == 14


def test_a_penalised_text_is_the_one_of_the_penalised_dense_logits(runner):
    asked = greedy(repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.2)
    row = Row(0, [4, 5, 4], [6, 7, 8], asked)
    run(runner, MIXED[1], [(row, 3)], admit=[row])
    for _ in range(9):
        run(runner, DECODE[1], [(row, 1)])
    tokens = [4, 5, 4]
    for _ in range(10):
        logits = dense_logits(tokens)[-1].astype(np.float64)
        for token in set(tokens):
            logits[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
        for token in set(tokens[3:]):
            logits[token] -= 0.6 + 0.2 * tokens[3:].count(token)
        tokens.append(int(logits.argmax()))
    assert row.output == tokens[3:]


def test_min_tokens_and_bias_reach_the_device(runner):
    plain = Row(0, [4, 5], [6, 7])
    run(runner, MIXED[1], [(plain, 2)], admit=[plain])
    for _ in range(3):
        run(runner, DECODE[1], [(plain, 1)])
    banned = Row(0, [4, 5], [6, 7], greedy(min_tokens=1), stop_ids=(plain.output[0],))
    run(runner, MIXED[1], [(banned, 2)], admit=[banned])
    assert banned.output[0] != plain.output[0]
    biased = Row(0, [4, 5], [6, 7], greedy(logit_bias=((77, 1000.0),)))
    run(runner, MIXED[1], [(biased, 2)], admit=[biased])
    for _ in range(2):
        run(runner, DECODE[1], [(biased, 1)])
    assert biased.output == [77, 77, 77]


def test_logprobs_of_the_drawn_tokens(runner):
    row = Row(0, [4, 5, 6], [6, 7], greedy(logprob_token_ids=(9, 3)))
    outputs = [run(runner, MIXED[1], [(row, 3)], admit=[row])]
    outputs += [run(runner, DECODE[1], [(row, 1)]) for _ in range(3)]
    exact = np.asarray(jax.nn.log_softmax(dense_logits(row.tokens), axis=-1))
    for i, output in enumerate(outputs):
        at = exact[len(row.prompt) - 1 + i]
        np.testing.assert_allclose(output.logprobs[0, 0], at[row.output[i]], atol=1e-4)
        np.testing.assert_allclose(output.asked_logprobs[0, 0, :2], at[[9, 3]], atol=1e-4)
        assert output.ranks[0, 0] == 1
        np.testing.assert_array_equal(output.top_ids[0, 0], np.argsort(-at)[:MAX_LOGPROBS])
        np.testing.assert_allclose(output.top_logprobs[0, 0], np.sort(at)[::-1][:MAX_LOGPROBS], atol=1e-4)
        assert output.target_logprobs is None


def test_sampled_logprobs_of_the_drawn_tokens_beside_the_raw_ones(runner):
    params = SamplingParams(max_tokens=64, temperature=0.7, top_k=20, logprobs=0, sampled_logprobs=True)
    row = Row(0, [4, 5, 6], [6, 7], params, seed=3)
    outputs = [run(runner, MIXED[1], [(row, 3)], admit=[row])]
    outputs += [run(runner, DECODE[1], [(row, 1)]) for _ in range(9)]
    logits = dense_logits(row.tokens)[len(row.prompt) - 1 : -1].astype(np.float64)
    for output, token, own in zip(outputs, row.output, logits, strict=True):
        raw = np.exp(own - own.max())
        kept = np.exp((own - own.max()) / 0.7) * (own >= np.sort(own)[-20])
        np.testing.assert_allclose(output.sampled_logprobs[0, 0], np.log(kept[token] / kept.sum()), atol=1e-4)
        np.testing.assert_allclose(output.logprobs[0, 0], np.log(raw[token] / raw.sum()), atol=1e-4)


def test_score_gives_the_logprob_of_every_prompt_token(runner):
    score = MIXED[2]
    rng = np.random.default_rng(6)
    first, second = (
        Row(slot, [int(t) for t in rng.integers(0, TINY.vocab_size, 13)], pages, greedy(prompt_logprobs=3))
        for slot, pages in ((0, [1, 2]), (2, [3, 4]))
    )
    found = {0: [], 2: []}
    for count in (5, 8):  # two chunks
        output = run(runner, score, [(first, count), (second, count)], admit=[first, second] if count == 5 else [])
        for row, start in ((first, 0), (second, count)):
            part = slice(start, start + count)
            sections = (output.target_logprobs, output.target_top_ids, output.target_ranks)
            found[row.slot].append(tuple(section[part] for section in sections))
    for row in (first, second):
        exact = np.asarray(jax.nn.log_softmax(dense_logits(row.prompt), axis=-1))
        scores, top_ids, ranks = (np.concatenate(parts) for parts in zip(*found[row.slot], strict=True))
        np.testing.assert_allclose(scores[:12], exact[np.arange(12), row.prompt[1:]], atol=1e-4)
        np.testing.assert_array_equal(top_ids[:12, 0], exact[:12].argmax(axis=1))
        own = exact[np.arange(12), row.prompt[1:]]
        np.testing.assert_array_equal(ranks[:12], 1 + (exact[:12] > own[:, None]).sum(axis=1))
        assert len(row.output) == 1


def test_nan_weights_are_reported_row_by_row():
    broken = tiny_model()
    embedding = broken.embedding.get_value().at[7].set(jnp.nan)
    broken.embedding.set_value(embedding)
    runner = tiny_runner(broken)
    bucket = Bucket(24, NUM_SLOTS, Variant.GREEDY)
    runner.warm_up([bucket], lambda line: None)
    good, bad = Row(0, [4, 5], [6]), Row(1, [4, 7], [7])
    output = run(runner, bucket, [(good, 2), (bad, 2)], admit=[good, bad])
    assert output.finite[:2].tolist() == [True, False]
    assert 0 <= output.tokens[1, 0] < TINY.vocab_size


# The pieces


@pytest.mark.parametrize("num_prompt", [0, 1, step.HISTORY_BLOCK, step.HISTORY_BLOCK + 3])
@pytest.mark.parametrize("num_output", [0, 1, step.HISTORY_BLOCK, 2 * step.HISTORY_BLOCK + 5])
def test_a_history_of_any_length_is_counted(num_prompt, num_output):
    vocab, slot = 11, 1
    rng = np.random.default_rng(num_prompt + num_output)
    prompt, output = (rng.integers(0, vocab - 2, n).astype(np.int32) for n in (num_prompt, num_output))
    history = np.full((2, vocab), 5, np.int32)
    for block in step.history_blocks(slot, prompt, output, vocab):
        history = _reset(history, block)
    expected = np.bincount(output, minlength=vocab)
    expected[np.unique(prompt)] += sampling.IN_PROMPT
    np.testing.assert_array_equal(history[slot], expected)
    np.testing.assert_array_equal(history[0], 5)


_reset = jax.jit(partial(step.reset_history, mesh=None))


def test_on_a_cpu_padding_stays_zero_in_every_layer():
    """The C code skips it (`tests/pallas_kernels/cpu/test_products.py`)."""
    compiler()
    library.load(NATIVE)
    config = replace(
        TINY, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=64
    )
    network = pack_for_cpu(random_weights(config, dtype=jnp.float32))
    attention = PagedAttention(paged_attention(config, page_size=16).spec, Backend.CPU)
    tokens, num_real = np.arange(1, 17, dtype=np.int32), 5
    batch = RaggedBatch(
        page_table=np.array([[1], [2], [0]], np.int32), kv_lens=np.array([2, 3, 0], np.int32),
        query_starts=np.array([0, 2, num_real, num_real], np.int32), num_singles=np.int32(0), num_rows=np.int32(2),
    )  # fmt: skip
    positions = np.array([0, 1, 0, 1, 2, *[0] * 11], np.int32)

    def hidden(count: int) -> np.ndarray:
        kv = [jnp.zeros((2, 3, 2, 16, 16)) for _ in range(config.num_layers)]
        found, _, tapped = step.run_model(
            network, tokens[:count], positions[:count], kv, [None] * config.num_layers, attention, batch, taps=(0, 1)
        )
        assert not any(np.any(x[num_real:]) for x in (found, *tapped))
        return np.asarray(found)

    np.testing.assert_array_equal(hidden(16)[:num_real], hidden(num_real))
