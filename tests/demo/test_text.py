"""What the generator writes: right answers, nothing held out, whole sentences."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from scripts.demo import facts, stories
from scripts.demo.arithmetic import (
    NUM_HELD_OUT,
    Arithmetic,
    count_answer,
    held_out_pairs,
    larger_answer,
    smaller_answer,
    sum_answer,
)
from scripts.demo.corpus import Chat, Corpus, Document
from scripts.demo.phrasing import typed
from scripts.demo.story_text import ANIMALS, BOYS, FANTASTIC, GIRLS, THINGS

NUM_SAMPLES = 6000


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(Arithmetic(), sum_share=0.38, story_share=0.3)


def turns(corpus: Corpus) -> Iterator[tuple[str, str]]:
    rng = random.Random(1)
    for _ in range(NUM_SAMPLES):
        sample = corpus.short(rng)
        if isinstance(sample, Chat):
            yield from sample.turns
        else:
            yield from (("", line) for line in sample.text.splitlines())


def test_answers_by_hand() -> None:
    assert sum_answer(47, 35) == "47 + 35 = 82."
    assert sum_answer(0, 99) == "0 + 99 = 99."
    assert larger_answer(31, 57) == larger_answer(57, 31) == "57 is larger than 31."
    assert smaller_answer(31, 57) == smaller_answer(57, 31) == "31 is smaller than 57."
    assert larger_answer(8, 8) == "They are equal: both are 8."
    assert count_answer(4, 9) == "4, 5, 6, 7, 8, 9."
    assert count_answer(3, 1) == "3, 2, 1."
    assert facts.capital_answer("France") == "The capital of France is Paris."
    assert facts.capital_answer("the United States") == "The capital of the United States is Washington, D.C."


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


def test_answers_speak_of_the_numbers_that_were_asked(corpus: Corpus) -> None:
    checked = 0
    for question, answer in turns(corpus):
        asked = sorted(map(int, re.findall(r"\d+", question)))
        if match := re.match(r"(\d+) \+ (\d+) = ", answer):
            if question:
                assert sorted(map(int, match.groups())) == asked
                checked += 1
        elif " than " in answer:
            assert sorted(map(int, re.findall(r"\d+", answer))) == asked
            checked += 1
    assert checked > 1000


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


def test_a_seed_is_a_corpus(corpus: Corpus) -> None:
    first, second, other = random.Random(5), random.Random(5), random.Random(6)
    drawn = [corpus.long(first) for _ in range(50)]
    assert drawn == [corpus.long(second) for _ in range(50)]
    assert drawn != [corpus.long(other) for _ in range(50)]


def test_stories_are_whole_and_various() -> None:
    rng = random.Random(2)
    made = [stories.story(rng) for _ in range(2000)]
    assert len({s.text for s in made}) > 1990
    for s in made:
        assert not re.search(r"[{}]|  | \.|\n\n\n", s.text), s.text
        assert s.text[0].isupper()
        assert s.text[-1] in '."'
        assert s.text.count('"') % 2 == 0
        assert s.hero.name in s.text
        assert s.friend.name in s.text
        assert s.hero.name != s.friend.name
        assert not re.search(r"\b[aA] [aeio]", s.text), "an indefinite article before a vowel"


def test_a_story_is_about_what_was_asked() -> None:
    rng = random.Random(3)
    people_and_things = {*ANIMALS, *FANTASTIC, *THINGS, "girl", "boy", *(name.lower() for name in GIRLS + BOYS)}
    named = 0
    for _ in range(500):
        question, text = stories.told(rng)
        asked_for = people_and_things & set(re.findall(r"\w+", question.lower()))
        assert asked_for <= set(re.findall(r"\w+", text.lower())), (question, text)
        named += bool(asked_for)
    assert named > 200


def test_typed_keeps_the_words() -> None:
    rng = random.Random(4)
    variants = {typed(rng, "What is 47 + 35?") for _ in range(500)}
    assert {"What is 47 + 35?", "what is 47 + 35", "What is 47 + 35", "what is 47 + 35?"} <= variants
    assert all("what is 47 + 35" in variant.lower() for variant in variants)


def test_capitals_are_a_few_dozen_and_distinct() -> None:
    assert len(facts.CAPITALS) >= 36
    assert len(set(facts.CAPITALS.values())) == len(facts.CAPITALS)


def test_documents_and_chats_of_every_kind_are_drawn(corpus: Corpus) -> None:
    rng = random.Random(7)
    samples = [corpus.long(rng) for _ in range(300)]
    assert any(isinstance(s, Document) for s in samples)
    chats = [s for s in samples if isinstance(s, Chat)]
    assert {len(chat.turns) for chat in chats} >= {1, 2, 3, 4}
    assert any(chat.system for chat in chats)
    assert any(not chat.system for chat in chats)
    assert all(8 <= len(chat.turns) < 24 for chat in (corpus.endless(rng) for _ in range(20)) if isinstance(chat, Chat))
