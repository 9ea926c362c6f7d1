"""Reasoning and answer are separated in the same way, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.reasoning import MAX_HELD_CHARS, REASONING_FORMATS, ReasoningReader, is_open_after
from server.text.tool_calls.json_calls import JsonCallParser
from server.text.tool_calls.pieces import CallDelta, Content, Reasoning

R1, QWEN3 = REASONING_FORMATS["deepseek_r1"], REASONING_FORMATS["qwen3"]
assert R1 is not None
assert QWEN3 is not None
CALL = '{"name": "f", "parameters": {"x": 1}}'
TEXTS = {
    "opened by the prompt": (QWEN3, "<think>\n", "It is four.\n</think>\n\n4", "It is four.", "4"),
    "opened by the model": (QWEN3, "", "<think>\nIt is four.\n</think>\n\n4", "It is four.", "4"),
    "without reasoning": (QWEN3, "", "4 is <b>it</b>", "", "4 is <b>it</b>"),
    "closed by the prompt": (R1, "<think>\n\n</think>\n\n", " 4", "", " 4"),
    "never opened": (R1, "", "It is four.</think>4", "It is four.", "4"),
    "never closed": (R1, "", "It is <four>. </thi", "It is <four>. </thi", ""),
    "empty": (R1, "<think>", "</think>4", "", "4"),
    "nothing": (QWEN3, "", "", "", ""),
    "an answer with tags": (R1, "<think>", "a</think>b<think>c</think>", "a", "b<think>c</think>"),
    "white space inside": (R1, "<think>", " a  b\n\nc\n</think>\n d ", "a  b\n\nc", "d "),
    "nearly a tag": (R1, "<think>", "a </ think></thin></think>b", "a </ think></thin>", "b"),
    "only white space": (QWEN3, "", " \n", "", " \n"),
    "much white space": (QWEN3, "", " " * 200 + "<think>", "", " " * 200 + "<think>"),
}


def read(reader: ReasoningReader, text: str, cuts: list[int], *, cut: bool = False) -> tuple[str, str, list[CallDelta]]:
    pieces = []
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(bounds):
        reader.push(text[start:end])
        pieces += reader.take()
    reader.finish(cut=cut)
    pieces += reader.take()
    for piece in pieces:
        if isinstance(piece, Content):
            assert text[piece.start :].startswith(piece.text)
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return reasoning, content, [piece for piece in pieces if isinstance(piece, CallDelta)]


@pytest.mark.parametrize("name", TEXTS)
@given(cuts=st.lists(st.integers(0, 60), max_size=12))
def test_reasoning_and_answer_are_told_apart(name: str, cuts: list[int]) -> None:
    format, prompt_end, text, reasoning, content = TEXTS[name]
    assert read(ReasoningReader(format, prompt_end=prompt_end), text, cuts) == (reasoning, content, [])


@given(cuts=st.lists(st.integers(0, 60), max_size=12))
def test_calls_are_read_in_the_answer_only(cuts: list[int]) -> None:
    text = f"I call {CALL}.</think>\n{CALL}"
    reader = ReasoningReader(R1, calls=JsonCallParser(["f"]))
    reasoning, content, calls = read(reader, text, cuts)
    assert (reasoning, content) == (f"I call {CALL}.", "")
    assert calls[0].name == "f"
    assert "".join(call.arguments for call in calls) == '{"x": 1}'
    assert reader.num_calls == 1


@given(cuts=st.lists(st.integers(0, 400), max_size=20))
def test_a_long_run_of_white_space_is_held_back_for_a_bounded_time(cuts: list[int]) -> None:
    text = "a" + " " * 300 + "b</think>c"
    reasoning, content, _ = read(ReasoningReader(R1), text, cuts)
    assert (reasoning, content) == ("a" + " " * 300 + "b", "c")
    reader = ReasoningReader(R1)
    reader.push("a" + " " * (MAX_HELD_CHARS + 1))
    (piece,) = reader.take()
    assert piece.text == "a" + " " * (MAX_HELD_CHARS + 1)


def test_reasoning_is_where_the_tokens_are_counted() -> None:
    reader = ReasoningReader(QWEN3)
    states = []
    for text in ("", "<thi", "nk>", "a", "</think", ">", "\n", "b"):
        reader.push(text)
        states.append(reader.is_reasoning)
    assert states == [False, False, True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("format", "prompt_end", "is_open"),
    [(QWEN3, "<think>\n", True), (QWEN3, "assistant\n", False), (R1, "assistant\n", True), (R1, "</think>\n", False)],
)
def test_the_prompt_says_where_the_answer_begins(format, prompt_end: str, is_open: bool) -> None:
    assert is_open_after(format, prompt_end) is is_open
