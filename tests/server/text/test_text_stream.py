from __future__ import annotations

import sys
import tracemalloc
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.text.reasoning import REASONING_FORMATS, ReasoningReader
from server.text.stop_strings import StopFinder, StopStrings
from server.text.stream import TextStream
from server.text.tokenizer import ByteLevelTokenizer
from tests.server.support.tokenizers import EOT, byte_tokenizer

TOKENIZER = ByteLevelTokenizer(byte_tokenizer(), config={}, chat_template=None)
NUM_BYTES = 256


def read(ids: list[int], tokenizer: Any = TOKENIZER, **options: Any) -> tuple[str, str | None]:
    """All that is shown, and the stop string that ended it."""
    stream = TextStream(tokenizer, **options)
    text = ""
    for id in ids:
        text += stream.push(id)
        if stream.matched_stop is not None:
            return text, stream.matched_stop
    return text + stream.finish(), stream.matched_stop


def pushes(texts: list[str], stops: list[str], **options) -> tuple[list[str], str | None]:
    finder = StopFinder(StopStrings(stops), **options)
    shown = []
    for text in texts:
        shown.append(finder.push(text))
        if finder.matched is not None:
            return shown, finder.matched
    return [*shown, finder.flush()], None


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By trying every end: (end, stop) of the first to be complete, of these the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


@given(st.lists(st.integers(0, NUM_BYTES - 1), max_size=40))
def test_any_bytes_read_as_the_tokenizer_reads_the_whole(ids):
    assert read(ids)[0] == byte_tokenizer().decode(ids)


@given(st.text(max_size=30))
def test_text_of_any_script_comes_back(text):
    assert read(list(text.encode()))[0] == text


@given(st.text(max_size=30))
def test_no_replacement_character_is_shown_before_a_character_is_whole(text):
    stream = TextStream(TOKENIZER)
    shown = ""
    for id in text.encode():
        shown += stream.push(id)
        assert text.startswith(shown)


def test_a_character_cut_off_at_the_end_becomes_one_replacement_character():
    assert read(list("aé".encode())[:-1])[0] == "a\ufffd"


def starts(ids: list[int], tokenizer: ByteLevelTokenizer = TOKENIZER, **options) -> list[int]:
    stream = TextStream(tokenizer, **options)
    found = []
    for id in ids:
        stream.push(id)
        found.append(stream.start)
    return found


def test_the_tokens_of_a_character_begin_where_it_does():
    assert starts(list("aé€b".encode())) == [0, 1, 1, 2, 2, 2, 3]
    assert starts([ord("a"), EOT, ord("b")]) == [0, 1, 1]
    assert starts([ord("a"), EOT, ord("b")], skip_special_tokens=False) == [0, 1, 11]


@given(st.lists(st.integers(0, 261), max_size=30))
@example([0xED, 0xA0, 0])  # held until the third byte, and then two characters
def test_the_text_from_a_tokens_start_begins_with_the_token(ids):
    text = read(ids, skip_special_tokens=False)[0]
    assert text == b"".join(TOKENIZER.token_bytes[id] for id in ids).decode(errors="replace")
    for id, start in zip(ids, starts(ids, skip_special_tokens=False), strict=True):
        raw = TOKENIZER.token_bytes[id]
        if raw.isascii():
            assert text[start:].startswith(raw.decode())
        else:
            assert text[start] == "\ufffd" or raw in text[start].encode()


@given(st.text(st.sampled_from("aéèñ€語🙂"), max_size=12))
def test_a_token_with_parts_of_two_characters_begins_with_the_first_of_them(text):
    """The merged token is the end of `é` and the beginning of the next character of two bytes."""
    backend = byte_tokenizer(merges=(("©", "Ã"),))
    tokenizer = ByteLevelTokenizer(backend, config={}, chat_template=None)
    (ids,) = tokenizer.encode_plain([text])
    num_bytes = 0
    for id, start in zip(ids, starts(ids, tokenizer), strict=True):
        assert start == len(text.encode()[:num_bytes].decode(errors="ignore"))
        num_bytes += len(tokenizer.token_bytes[id])


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|eot_id|>b")])
def test_special_tokens(skip, text):
    assert read([ord("a"), EOT, ord("b")], skip_special_tokens=skip)[0] == text


def test_a_special_token_within_a_character_does_not_break_it():
    first, second = "é".encode()
    assert read([first, EOT, second])[0] == "é"


def test_an_id_beyond_the_tokenizer_is_no_text():
    assert read([ord("a"), 5000, ord("b")])[0] == "ab"


HOSTILE = {
    "one long beginning in many strings": ["a" * 500 + "b" * 523 + chr(65 + i) for i in range(31)],
    "beginnings of every length": ["a" * (16 * i + 16) + "b" * (1007 - 16 * i) + "X" for i in range(31)],
    "a string in which it repeats": [("ab" * i + "a") * (1000 // (2 * i + 1)) + "X" for i in range(1, 32)],
}


@pytest.mark.parametrize("piece", ["a" * 8, "a" * 500 + "c", "a" * 499 + "b", "ab" * 20 + "a"], ids=lambda p: p[-4:])
@pytest.mark.parametrize("stops", HOSTILE.values(), ids=HOSTILE.keys())
def test_the_work_for_a_character_and_a_string_is_bounded(stops, piece):
    """Counted in lines of Python that run in the server's files."""
    finder = StopFinder(StopStrings(stops))
    num_lines = 0

    def count(frame, event, _):
        nonlocal num_lines
        num_lines += event == "line" and "/server/" in frame.f_code.co_filename
        return count

    pieces = [piece] * (5000 // len(piece))
    tracer = sys.gettrace()
    sys.settrace(count)
    try:
        for text in pieces:
            finder.push(text)
    finally:
        sys.settrace(tracer)
    assert finder.matched is None
    assert num_lines < 10 * len(stops) * sum(map(len, pieces))


def test_the_longest_stop_strings_take_little_memory():
    stops = [chr(0x4E00 + i) + chr(0x5E00 + i) * 1023 for i in range(32)]
    tracemalloc.start()
    try:
        kept = StopStrings(stops)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert StopFinder(kept).push("a" + stops[5]) == "a"
    assert num_bytes < 2**20


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3) | st.lists(
    st.text("abé🙂", min_size=1, max_size=12), min_size=1, max_size=32
)
PIECES = st.lists(st.text("abcé🙂", max_size=4) | st.text("ab", max_size=30), max_size=12)


@given(PIECES, STOPS, st.booleans())
def test_stop_strings_do_not_depend_on_the_pieces(pieces, stops, include):
    text = "".join(pieces)
    shown, matched = pushes(pieces, stops, include_in_output=include)
    found = first_stop(text, stops)
    if found is None:
        assert matched is None
        assert "".join(shown) == text
    else:
        end, stop = found
        assert matched == stop
        assert "".join(shown) == text[: end if include else end - len(stop)]


@given(PIECES, STOPS)
def test_no_more_is_held_back_than_must_be(pieces, stops):
    finder = StopFinder(StopStrings(stops))
    text = ""
    shown = ""
    for piece in pieces:
        text += piece
        shown += finder.push(piece)
        if finder.matched is not None:
            return
        held = text[len(shown) :]
        possible = [text[i:] for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops)]
        assert held == max(possible, key=len, default="")


def test_stop_strings_count_only_after_min_tokens():
    ids = list(b"stop and stop!")
    assert read(ids, stops=StopStrings(["stop"])) == ("", "stop")
    assert read(ids, stops=StopStrings(["stop"]), min_tokens=4) == ("stop and ", "stop")


def test_a_stop_string_of_whole_characters_that_come_in_bytes():
    assert read(list("aé€b".encode()), stops=StopStrings(["é€"])) == ("a", "é€")


def test_a_stop_string_in_the_last_broken_character():
    assert read([ord("a"), 0xE2], stops=StopStrings(["\ufffd"])) == ("a", "\ufffd")


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
@given(
    before=st.sampled_from(["", "<think>", " \n<think>\nab", "<think>b a</thi</think>", "<think>ab</think> \n"]),
    answer=st.text("ab \n<", max_size=12),
    cuts=st.sets(st.integers(1, 40)),
    stops=st.lists(st.text("ab \n<", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_stop_strings_act_on_the_answer(before, answer, cuts, stops, min_tokens):
    text = before + answer
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    tokens = [text[start:end] for start, end in pairwise(bounds)]
    end = text.find("</think>") + len("</think>")
    content = text if not before else text[end:].lstrip() if end >= len("</think>") else ""
    unsearched = max(0, len("".join(tokens[:min_tokens])) - (len(text) - len(content)))
    found = first_stop(content[unsearched:], stops)
    expected = content if found is None else content[: unsearched + found[0] - len(found[1])]
    tokenizer = SimpleNamespace(token_bytes=[token.encode() for token in tokens], special_ids=frozenset())
    reader = ReasoningReader(REASONING_FORMATS["qwen3"])
    shown, matched = read(
        [*range(len(tokens))], tokenizer, stops=StopStrings(stops), min_tokens=min_tokens, reasoning=reader
    )
    assert (shown, matched) == (expected, None if found is None else found[1])
