"""An engine without drafts runs the programs that it would run if there were no drafts at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import pytest

from batcher.slots import SlotLayout
from batcher.step import Bucket, PackedLayout, Variant
from model.execution import draft_pages, page_text, speculative_step, step
from model.execution.drafter import Drafter
from model.execution.memory_plan import RunnerConfig
from model.execution.prompt_lookup import PromptLookup
from model.execution.step_programs import StepPrograms
from tests.model.driver import TINY, paged_attention, tiny_model
from tests.model.execution.drafting import LIMITS, PLAIN

BUCKETS = [bucket for bucket in PLAIN.buckets() if bucket.variant in (Variant.GREEDY, Variant.SAMPLE)]
NUM_PAGES = 8


def programs(**config: object) -> StepPrograms:
    draft = None
    if config.pop("has_draft", False):
        draft = tiny_model(config=replace(TINY, num_layers=1)), paged_attention()
    return StepPrograms(tiny_model(), paged_attention(), RunnerConfig(**LIMITS | config), NUM_PAGES, draft)


def lowered(made: StepPrograms, bucket: Bucket) -> str:
    jax.clear_caches()  # else a function that was traced before is not traced again
    return made.step(bucket).as_read().lower().as_text()


@pytest.fixture(scope="module")
def plain() -> Callable[[Bucket], str]:
    """The program of a bucket where there are no drafts."""
    return cache(lambda bucket: lowered(programs(), bucket))


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_no_line_of_speculation_is_traced(bucket, plain, monkeypatch) -> None:
    before = plain(bucket)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a program without drafts computes something for them")

    for module, names in {
        page_text: ("places", "write", "read"),
        draft_pages: ("lengths", "take_back", "fill", "keep_features"),
        speculative_step: ("make_speculative_step", "draw_after_drafts"),
        step: ("propose", "_would_accept"),
        Drafter: ("propose", "accept", "features"),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    assert lowered(programs(), bucket) == before


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_its_arguments_and_results_are_those_of_a_step(bucket, plain) -> None:
    """The weights, slots, history, masks, pages and what the host sends; the state and the output."""
    made = programs()
    text = plain(bucket)
    (signature,) = re.findall(r"func\.func public @main\((.*)\) -> \((.*)\) \{", text)
    arguments, results = (re.findall(r"tensor<([^>]*)>", part) for part in signature)
    width, vocab = SlotLayout.width(-(-LIMITS["max_model_len"] // made.attention.spec.page_size)), TINY.vocab_size
    slots, pages = LIMITS["max_num_seqs"], "x".join(map(str, made.attention.kv_pages(NUM_PAGES + 1).shape)) + "xf32"
    masks = made.state_like.masks.shape[1]
    state = [f"{slots}x{width}xi32", f"{slots}x{vocab}xi32", f"{slots}x{masks}xi32", *[pages] * TINY.num_layers]
    assert len(arguments) == len(made.weights_like) + len(state) + 1
    assert arguments[len(made.weights_like) :] == [*state, f"{PackedLayout(bucket).size}xi32"]
    assert results[:-1] == state


@pytest.mark.parametrize("config", [{"lookup": PromptLookup(min_tokens=1, max_tokens=3)}, {"has_draft": True}])
def test_drafts_change_these_programs_only_where_they_are_configured(config, plain) -> None:
    """So the comparisons above can fail."""
    config |= {"max_draft_rows": 4}
    bucket = BUCKETS[0]
    assert lowered(programs(**config), bucket) != plain(bucket)
