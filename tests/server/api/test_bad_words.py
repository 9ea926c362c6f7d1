"""`bad_words` of a request, as the token ids that the engine gets."""

from __future__ import annotations

import pytest

from server.api.request.prompts import MAX_BAD_WORD_CHARS as MAX_CHARS
from server.text.tokenizer import ByteLevelTokenizer
from tests.e2e.conftest import ROOT
from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, state_of


def sent(
    words: list[str], tokenizer: ByteLevelTokenizer | None = None, n: int = 1
) -> list[tuple[tuple[int, ...], ...]]:
    client = StubClient(DONE)
    state = state_of(client)
    state.model.tokenizer = tokenizer or state.model.tokenizer
    answer = call(state, "POST", COMPLETIONS, json={"prompt": [1], "bad_words": words, "n": n})
    assert answer.status_code == 200, answer.text
    return [request.sampling.bad_words for request in client.submitted]


def test_a_space_that_is_a_token_of_its_own_adds_no_form():
    assert sent(["ab", " c", "ab"], n=2) == [((97, 98), (99,))] * 2
    assert sent([]) == [()]


def test_a_word_has_a_form_after_a_space():
    demo = ByteLevelTokenizer.from_folder(ROOT / "model/demo")
    (is_, and_), (the, spaced_the) = (demo.encode_plain(texts) for texts in (["is", "and"], ["the", " the"]))
    (spaced_is, spaced_and) = demo.encode_plain([" is", " and"])
    assert (len(is_), len(spaced_is), len(the), len(spaced_the)) == (1, 1, 2, 1)
    expected = (is_, spaced_is, the, and_, spaced_and)  # " the" is shorter than "the": vLLM leaves it out
    assert sent([" is", "the", "and"], demo) == [tuple(map(tuple, expected))]


def test_what_looks_like_a_special_token_is_text():
    (words,) = sent(["<|eot_id|>"])
    assert words == (tuple(b"<|eot_id|>"),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", " "], "bad_words: a word must not be empty"),
        (["a" * (MAX_CHARS + 1)], f"bad_words: a word has at most {MAX_CHARS} characters"),
        (["a"] * 257, "bad_words: at most 256 entries are allowed"),
    ],
)
def test_words_that_cannot_be_barred_are_refused(words, message):
    answer = call(state_of(StubClient(DONE)), "POST", COMPLETIONS, json={"prompt": "a", "bad_words": words})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
