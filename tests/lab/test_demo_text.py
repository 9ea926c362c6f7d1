"""What the generator writes: right answers, nothing held out, whole sentences."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from scripts.lab.demo import calculator
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


def test_every_sum_and_comparison_that_is_written_is_right(corpus: Corpus) -> None:
    kinds: Counter[str] = Counter()
    for _, answer in turns(corpus):
        if match := re.search(r"(\d+) \+ (\d+) = (\d+)", answer):
            a, b, total = map(int, match.groups())
            assert a + b == total
            kinds["sum"] += 1
        elif match := re.fullmatch(r"(\d+) is (larger|smaller) than (\d+)\.", answer):
            a, b = int(match[1]), int(match[3])
            assert a > b if match[2] == "larger" else a < b
            kinds[match[2]] += 1
        elif match := re.fullmatch(r"After (\d+) comes (\d+)\.", answer):
            assert int(match[1]) + 1 == int(match[2])
            kinds["after"] += 1
        elif match := re.fullmatch(r"Before (\d+) comes (\d+)\.", answer):
            assert int(match[1]) - 1 == int(match[2])
            kinds["before"] += 1
        elif match := re.fullmatch(r"(\d+) is (odd|even)\.", answer):
            assert int(match[1]) % 2 == (match[2] == "odd")
            kinds["parity"] += 1
        elif re.fullmatch(r"\d+(, \d+)+\.", answer):
            numbers = [int(n) for n in re.findall(r"\d+", answer)]
            assert {b - a for a, b in itertools.pairwise(numbers)} in ({1}, {-1})
            kinds["count"] += 1
    assert set(kinds) == {"sum", "larger", "smaller", "after", "before", "parity", "count"}
    assert kinds["sum"] > NUM_SAMPLES / 3


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


def test_calls_and_results_are_right(corpus: Corpus) -> None:
    """Python computes each expression once more. No two numbers of a held-out pair stand side by side in one."""
    rng, held_out = random.Random(8), set(held_out_pairs())
    chats = [corpus.with_tools(rng) for _ in range(600)]
    called = Counter[str]()
    for chat in chats:
        assert isinstance(chat, Chat)
        for turn in chat.turns:
            called[f"{len(turn)}"] += 1
            if len(turn) == 2:
                continue
            assert calculator.is_among(chat.tools)
            question, call, result, answer = turn
            call = json.loads(call)
            assert call.keys() == {"name", "parameters"}
            assert call["name"] == calculator.NAME
            expression = call["parameters"]["expression"]
            numbers = re.findall(r"\d+", expression)
            assert sorted(numbers) == sorted(re.findall(r"\d+", question))
            assert all(tuple(sorted(pair)) not in held_out for pair in itertools.pairwise(map(int, numbers)))
            (said,) = re.findall(r"-?\d+(?:\.\d+)?", result)
            assert float(said) == pytest.approx(eval(expression), abs=0.006)
            assert answer == f"{expression} = {said}."
            called[re.findall(r" (.) ", expression)[0]] += 1
    assert set(called) == {"2", "4", "+", "-", "*", "/"}
    assert called["4"] > 500
    assert called["2"] > 500
    assert any(not calculator.is_among(chat.tools) for chat in chats)


def test_the_split_does_not_move() -> None:
    assert held_out_pairs()[:3] == [(61, 92), (47, 85), (5, 71)]
