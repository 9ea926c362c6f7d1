"""A request whose pages left the device and came back to others goes on as if they had stayed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from batcher.grammar import num_mask_words
from batcher.request import SamplingParams
from batcher.slots import SlotLayout
from batcher.step import Bucket, PackedLayout, StepOutput, Variant
from model.compiling.compile_cache import keep_compilations
from model.execution.memory_plan import RunnerConfig
from model.execution.prompt_lookup import PromptLookup
from model.execution.runner import ModelRunner
from model.loading.weights import random_weights
from model.network.sharding import make_mesh
from tests.conftest import COMPILED
from tests.model.driver import TINY, Row, int8_scales, paged_attention, run, tiny_model
from tests.model.driver import pack as packed_step
from tests.model.execution.drafting import head

pytestmark = pytest.mark.slow

keep_compilations(COMPILED)
NUM_DRAFTS = 3
PROMPT, DECODE = Bucket(24, 4, Variant.SAMPLE), Bucket(4, 4, Variant.SAMPLE)
DRAFTS = Bucket(16, 4, Variant.SAMPLE, num_drafts=NUM_DRAFTS)
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 64, "num_pages": 40}
WITH_LOGPROBS = SamplingParams(max_tokens=64, temperature=0, logprobs=5)
FEW = (3, 17, 44)  # allowed tokens: drafts can be looked up in the text, and some are right
TEXT = [*FEW, 90] * 5
MASK = np.zeros(num_mask_words(TINY.vocab_size), np.int32)
MASK[0], MASK[1] = 1 << 3 | 1 << 17, 1 << 44 - 32
STAYS, LEAVES, COMES_TO = [*range(1, 9)], [*range(9, 17)], [30, 20, 31, 21, 32, 22, 33, 23]  # pages


def warm_runner(form: str) -> ModelRunner:
    model, draft, options = tiny_model(), None, {}
    kv_dtype, mesh = jnp.int8 if form == "int8" else jnp.float32, None
    if form == "two chips":
        mesh = make_mesh(2)
        model = random_weights(replace(TINY, vocab_size=200), dtype=jnp.float32, mesh=mesh)
    elif form == "lookup":
        options["lookup"] = PromptLookup(min_tokens=1, max_tokens=3)
    elif form == "draft model":
        draft = tiny_model(), paged_attention()  # the model itself: drafts are right as long as its K/V are
    elif form == "eagle3":
        draft = head(form), paged_attention()
    if form in ("lookup", "draft model", "eagle3"):
        options |= {"max_draft_rows": 4, "max_drawn": DRAFTS.num_tokens}
    attention = paged_attention(model.config, kv_dtype=kv_dtype, mesh=mesh)
    limits = RunnerConfig(**LIMITS, moves_pages=True, **options)
    scales = int8_scales(model) if attention.spec.has_kv_scales else None
    made = ModelRunner(model, attention, limits, scales, draft=draft, program_folder=COMPILED)
    made.warm_up([PROMPT, DECODE, DRAFTS] if "max_draft_rows" in options else [PROMPT, DECODE], lambda line: None)
    return made


@pytest.fixture(scope="module", params=["float32", "int8", "two chips", "lookup", "draft model", "eagle3"])
def runner(request) -> ModelRunner:
    return warm_runner(request.param)


@pytest.fixture(scope="module")
def plain() -> ModelRunner:
    return warm_runner("float32")


def bytes_of(runner: ModelRunner, count: int) -> list[np.ndarray]:
    return [np.zeros(runner.capacity().page_bytes, np.uint8) for _ in range(count)]


def read(runner: ModelRunner, pages: list[int]) -> list[np.ndarray]:
    found = bytes_of(runner, len(pages))
    runner.read_pages(pages).copy_to(found)
    return found


def garbage(runner: ModelRunner, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return list(rng.integers(0, 256, (count, runner.capacity().page_bytes), dtype=np.uint8))


def prefill(runner: ModelRunner, rows: list[Row]) -> None:
    admit = rows
    while rows[0].num_computed < len(rows[0].prompt):
        run(runner, PROMPT, [(row, 10) for row in rows], admit=admit)
        admit = []


def draw(runner: ModelRunner, rows: list[Row]) -> StepOutput:
    """A step in which each row brings its last token and drafts."""
    width = SlotLayout.width(runner.capacity().pages_per_seq)
    step = packed_step(DRAFTS, [(row, 1) for row in rows], num_slots=runner.capacity().num_slots, width=width)
    sections = PackedLayout(DRAFTS).sections()
    step.packed[sections["q_lens"]][: len(rows)] = 1 + NUM_DRAFTS
    step.packed[0], step.packed[2] = 0, (1 + NUM_DRAFTS) * len(rows)
    step.packed[sections["tokens"]] = -1
    output = runner.execute(step).result()
    for number, row in enumerate(rows):
        row.output += output.tokens[number, : 1 + output.num_accepted[number]].tolist()
        row.num_computed = len(row.tokens) - 1
    return output


def assert_same_rows(output: StepOutput) -> None:
    """Of the first two rows, to the last bit. What is drawn after a wrong draft depends on the draft."""
    for name in ("tokens", "finite", "num_drafts", "num_accepted", "logprobs", "top_ids", "top_logprobs"):
        values = getattr(output, name)
        if values is not None:
            first, second = values[:2]
            np.testing.assert_array_equal(first, second, name)


def test_a_request_goes_on_with_its_pages_elsewhere(runner) -> None:
    runner.recover()
    compiles = runner.num_compiles
    stays, leaves = (Row(slot, TEXT, pages, WITH_LOGPROBS, mask=MASK) for slot, pages in enumerate((STAYS, LEAVES)))
    prefill(runner, [stays, leaves])
    has_drafts = DRAFTS in runner.programs.steps
    for _ in range(2):
        run(runner, DECODE, [(stays, 1), (leaves, 1)])
        if has_drafts:
            draw(runner, [stays, leaves])
    while leaves.num_computed % 8 == 0:  # the last page is not full
        run(runner, DECODE, [(stays, 1), (leaves, 1)])
    used = -(-leaves.num_computed // 8)
    away = read(runner, LEAVES[:used])
    runner.write_pages(runner.stage_pages(garbage(runner, len(LEAVES))), LEAVES)
    runner.write_pages(runner.stage_pages(away), COMES_TO[:used])
    back = replace(leaves, slot=2, pages=COMES_TO, has_emitted=False)
    output = run(runner, DECODE, [(stays, 1), (back, 1)], admit=[back])
    assert_same_rows(output)
    num_drafts = 0
    for _ in range(6):
        if has_drafts:
            output = draw(runner, [stays, back])
            assert_same_rows(output)
            num_drafts += output.num_drafts[1]
        output = run(runner, DECODE, [(stays, 1), (back, 1)])
        assert_same_rows(output)
        assert output.finite[:2].all()
    assert num_drafts or not has_drafts
    assert back.output == stays.output
    assert runner.num_compiles == compiles


def test_a_read_page_is_that_of_the_steps_before_it(plain) -> None:
    plain.recover()
    first, second = Row(0, TEXT, STAYS, WITH_LOGPROBS), Row(1, [9] * 20, STAYS, WITH_LOGPROBS)
    prefill(plain, [first])
    expected = read(plain, STAYS[:3])
    reading = plain.read_pages(STAYS[:3])
    prefill(plain, [second])
    later = read(plain, STAYS[:3])
    found = bytes_of(plain, 3)
    reading.copy_to(found)
    for own, right, wrong in zip(found, expected, later, strict=True):
        np.testing.assert_array_equal(own, right)
        assert (wrong != right).any()


def test_what_was_staged_does_not_follow_the_hosts_memory(plain) -> None:
    plain.recover()
    prefill(plain, [Row(0, TEXT, STAYS, WITH_LOGPROBS)])
    pages = read(plain, STAYS[:3])
    expected = [page.copy() for page in pages]
    staged = plain.stage_pages(pages)
    for page in pages:
        page[:] = 0xFF
    plain.write_pages(staged, COMES_TO[:3])
    for own, right in zip(read(plain, COMES_TO[:3]), expected, strict=True):
        np.testing.assert_array_equal(own, right)


def test_a_recovery_empties_pages_and_keeps_what_is_staged(plain) -> None:
    plain.recover()
    content = garbage(plain, 2)
    plain.write_pages(plain.stage_pages(content), [1, 2])
    reading, staged = plain.read_pages([1, 2]), plain.stage_pages(content)
    plain.recover()
    assert not np.any(read(plain, [1, 2]))
    found = bytes_of(plain, 2)
    reading.copy_to(found)
    plain.write_pages(staged, [3, 4])
    np.testing.assert_array_equal(found, content)
    np.testing.assert_array_equal(read(plain, [3, 4]), content)


def test_pages_stay_where_it_is_not_asked_for() -> None:
    made = ModelRunner(tiny_model(), paged_attention(), RunnerConfig(**LIMITS))
    assert made.capacity().page_bytes == made.capacity().pages_of_copy == 0
    assert not any("pages" in name for name in made.described.updates())
