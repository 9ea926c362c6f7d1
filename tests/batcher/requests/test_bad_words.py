"""Bad words are never written, alone and together with everything else that restricts what may be drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.errors import InvalidRequestError
from batcher.request import ErrorCode
from batcher.requests.bad_words import BadWords, without
from tests.batcher.fake_runner import completes
from tests.batcher.harness import Drive, make_capacity, make_request
from tests.examples import examples

FEW = tuple(range(10, 16))  # so few tokens that words do come up


def bits(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_the_last_token_is_barred_after_the_others_by_hand() -> None:
    everything = without(np.full(1, -1, np.int32), range(8, 32))
    words = BadWords([(1, 2), (2, 2, 3), (2, 2, 4), (1, 2, 2)], everything, None)
    barred = [sorted(set(range(8)) - set(bits(words.advance(tokens).mask))) for tokens in ((), (1,), (2,), (2,), (2,))]
    assert barred == [[], [2], [2], [3, 4], [3, 4]]
    assert bits(everything) == list(range(8))


@settings(max_examples=examples(80), derandomize=True)
@given(st.data())
def test_outputs_are_those_foretold_in_any_company(data: st.DataObject) -> None:
    """With grammars, allowed tokens, penalties and min_tokens; in few pages, so that some are preempted."""
    draw = data.draw
    drive = Drive(make_capacity(num_pages=draw(st.integers(16, 30))), pipeline_depth=draw(st.integers(1, 2)))
    word = st.lists(st.sampled_from(FEW), min_size=2, max_size=4).map(tuple)
    for number in range(draw(st.integers(1, 6))):
        options: dict[str, object] = {"allowed_token_ids": (*FEW, 1)}
        if draw(st.booleans()):
            options |= {"bad_words": tuple(draw(st.lists(word, max_size=8))) + draw(st.sampled_from([(), ((10,),)]))}
        if draw(st.booleans()):
            options |= {"min_tokens": 5, "frequency_penalty": 0.5}
        options |= {"temperature": 1.0, "seed": number, "max_tokens": draw(st.integers(5, 30))}
        drive.add(make_request(str(number), range(20, 20 + draw(st.integers(1, 20))), **options))
    drive.finish()
    for name, heard in drive.heard.items():
        if heard.last.error_code is None:  # a set of words may leave nothing to be drawn
            words = drive.requests[name].sampling.bad_words
            assert not any(completes(words, heard.tokens[: i + 1]) for i in range(len(heard.tokens)))
            assert heard.tokens == drive.expected(name)


def test_they_hold_under_a_grammar() -> None:
    drive = Drive()
    options = {"grammar": "2 6 9", "temperature": 1.0, "max_tokens": 20, "allowed_token_ids": (10, 11, 12, 13, 1, 2)}
    for seed in range(6):
        drive.add(make_request(str(seed), [40], bad_words=((10, 11), (12, 13, 12), (2,)), seed=seed, **options))
    drive.finish()
    drive.check_outputs()
    assert all(2 not in heard.tokens for heard in drive.heard.values())


def test_words_of_one_token_cost_no_step() -> None:
    drive = Drive()
    drive.add(make_request("a", [40], bad_words=((7,), (9,)), max_tokens=10, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert [len(step.masks) for step in drive.runner.steps] == [1] + [0] * 9
    drive.add(make_request("b", [40], bad_words=((7, 8),), max_tokens=10, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert [len(step.masks) for step in drive.runner.steps[10:]] == [1] * 10


def test_where_nothing_is_left_the_request_alone_ends() -> None:
    drive = Drive()
    bad = drive.add(make_request("a", [40], bad_words=((5, 5), (5, 6)), allowed_token_ids=(5, 6), max_tokens=20))
    fine = drive.add(make_request("b", [40], max_tokens=5, ignore_eos=True))
    drive.finish()
    assert bad.last.error_code is ErrorCode.GRAMMAR
    assert "bad_words" in bad.last.error
    assert fine.tokens == drive.expected("b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bad_words": ((),)}, "a word must have at least one token id"),
        ({"bad_words": ((100,),)}, "out of range"),
        ({"bad_words": ((5, -1),)}, "out of range"),
        ({"bad_words": tuple((i,) for i in range(100))}, "at least one token that is not a bad word"),
        ({"bad_words": ((5,),), "allowed_token_ids": (5,)}, "at least one token that is not a bad word"),
        ({"bad_words": ((5,),), "allowed_token_ids": (5, 1, 2), "min_tokens": 2}, "one that is no stop id"),
    ],
)
def test_what_could_never_be_drawn_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        Drive().add(make_request("a", [40], **options))
