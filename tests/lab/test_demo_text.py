"""What the generator writes: right answers, nothing held out, whole sentences."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from scripts.lab.demo import calculator, facts, json_answers, stories
from scripts.lab.demo.arithmetic import (
    NUM_HELD_OUT,
    Arithmetic,
    count_answer,
    held_out_pairs,
    larger_answer,
    smaller_answer,
    sum_answer,
)
from scripts.lab.demo.corpus import Chat, Corpus, Document
from scripts.lab.demo.phrasing import typed
from scripts.lab.demo.stories import TEXT

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


def test_with_the_calculator_nothing_is_left_undone(corpus: Corpus) -> None:
    rng = random.Random(9)
    excuses = (facts.LARGE_NUMBER_ANSWER, facts.OTHER_OPERATION_ANSWER)
    for _ in range(400):
        chat = corpus.with_tools(rng)
        assert isinstance(chat, Chat)
        if calculator.is_among(chat.tools):
            assert not any(turn[-1] in excuses or (len(turn) == 2 and " + " in turn[1]) for turn in chat.turns)


@pytest.mark.parametrize(
    ("question", "text", "stated"),
    [
        ("What is 47 + 35?", "47 + 35 = 82.", 82),
        ("I have 3 nuts and get 4 more.", "3 + 4 = 7. There are 7 nuts.", 7),
        ("Which is larger, 31 or 57?", "57 is larger than 31.", 57),
        ("Which is larger, 8 or 8?", "They are equal: both are 8.", 8),
        ("Count from 4 to 6.", "4, 5, 6.", [4, 5, 6]),
        ("What comes after 9?", "After 9 comes 10.", 10),
        ("Is 9 even?", "9 is odd.", "odd"),
        ("capital of the united states?", "The capital of the United States is Washington, D.C.", "Washington, D.C."),
        ("what country is oslo the capital of?", "The capital of Norway is Oslo.", "Norway"),
        ("Thanks!", "You are welcome!", None),
    ],
)
def test_what_an_answer_states(question: str, text: str, stated: object) -> None:
    assert json_answers.stated(question, text) == stated
    assert json.loads(json_answers.answer(question, text)) == {"text": text, "answer": stated}


def test_json_comes_where_it_is_asked_for(corpus: Corpus) -> None:
    rng, asked = random.Random(10), 0
    for _ in range(2000):
        chat = corpus.short(rng)
        if not isinstance(chat, Chat):
            continue
        always = chat.system in json_answers.SYSTEM_PROMPTS
        for question, answer in chat.turns:
            assert answer.startswith('{"text": ') == (always or "json" in question.lower())
            asked += answer.startswith("{")
    assert asked > 100


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
    people_and_things = {"girl", "boy", *TEXT["animals"], *TEXT["fantastic"], *TEXT["things"]}
    people_and_things |= {name.lower() for name in TEXT["girls"] + TEXT["boys"]}
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
