"""What programs keep for drafts is updated in place, as the rest of the state is."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import jax
import pytest

from batcher.step import Bucket, Variant
from model.eagle_config import EagleForm
from model.execution.memory_plan import RunnerConfig
from model.execution.prompt_lookup import PromptLookup
from model.execution.step_programs import StepPrograms
from tests.model.driver import TINY, paged_attention, tiny_model
from tests.model.execution.drafting import LIMITS, head

pytestmark = pytest.mark.slow

LOOKUP = {"lookup": PromptLookup(min_tokens=1, max_tokens=3)}
DRAFTERS = {
    "lookup": lambda: None,
    "draft model": lambda: (tiny_model(config=replace(TINY, num_layers=1)), paged_attention()),
    "EAGLE-3": lambda: (head(EagleForm.EAGLE3), paged_attention()),
}
NUM_PAGES = 400  # so many that no other array of a program is as large as the text
BUCKETS = [Bucket(4, 4, Variant.GREEDY), *(Bucket(4 * rows, rows, Variant.GREEDY, num_drafts=3) for rows in (1, 4))]


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_step_copies_nothing_of_its_state(name, bucket) -> None:
    draft = DRAFTERS[name]()
    config = RunnerConfig(**LIMITS, max_draft_rows=4, **(LOOKUP if draft is None else {}))
    programs = StepPrograms(tiny_model(), paged_attention(), config, NUM_PAGES, draft)
    text = programs.step(bucket).lower().compile().as_text()
    state = {math.prod(leaf.shape) for leaf in jax.tree.leaves(programs.state_like)}
    state -= {NUM_PAGES + 1}  # one number a page, which the loop of a network that drafts carries
    shapes = [tuple(map(int, found.split(","))) for found in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)]
    assert not [shape for shape in shapes if math.prod(shape) in state]
