"""What the generator writes: right answers, nothing held out, whole sentences."""

import json
import random
import re
from collections.abc import Iterator

import pytest

from scripts.lab.demo.arithmetic import (
    NUM_HELD_OUT,
    Arithmetic,
    held_out_pairs,
)
from scripts.lab.demo.corpus import Chat, Corpus

NUM_SAMPLES = 6000


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(Arithmetic(), sum_share=0.38, story_share=0.3)


def turns(corpus: Corpus) -> Iterator[tuple[str, str]]:
    """Questions and answers. Of an answer in JSON, its text."""
    rng = random.Random(1)
    for _ in range(NUM_SAMPLES):
        sample = corpus.short(rng)
        if isinstance(sample, Chat):
            for question, answer in sample.turns:
                yield question, json.loads(answer)["text"] if answer.startswith("{") else answer
        else:
            yield from (("", line) for line in sample.text.splitlines())


def test_held_out_pairs_are_never_added_or_compared(corpus: Corpus) -> None:
    held_out = set(held_out_pairs())
    assert len(held_out) == NUM_HELD_OUT
    assert all(0 <= a < b <= 99 for a, b in held_out)
    seen = set()
    for question, answer in turns(corpus):
        for text in (question, answer):
            for a, b in re.findall(r"(\d+)\s*(?:\+|plus|or|and|to|is larger than|is smaller than)\s*(\d+)", text):
                if "ount" not in question and "umbers from" not in question:
                    seen.add((min(int(a), int(b)), max(int(a), int(b))))
    assert not held_out & seen
    possible = {(a, b) for a in range(100) for b in range(a, 100)}
    assert len(seen & possible) > 0.75 * len(possible), (
        "the check above must have seen most of the pairs that are allowed"
    )


def test_the_split_does_not_move() -> None:
    assert held_out_pairs()[:3] == [(61, 92), (47, 85), (5, 71)]
