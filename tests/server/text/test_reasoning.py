"""Reasoning and answer are separated in the same way, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine import wire
from server.text.reasoning import (
    MAX_HELD_CHARS,
    REASONING_FORMATS,
    ReasoningReader,
    is_open_after,
    reasoning_format_asked,
    reasoning_format_in,
)
from tests.server.support.requests import CHAT
from tests.server.support.stub_app import StubClient, call, state_of
from tests.server.support.tokenizers import LLAMA3_TEMPLATE

R1, QWEN3 = REASONING_FORMATS["deepseek_r1"], REASONING_FORMATS["qwen3"]
assert R1 is not None
assert QWEN3 is not None
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


def read(reader: ReasoningReader, text: str, cuts: list[int]) -> tuple[str, str]:
    pieces, answer = [], ""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(bounds):
        answer += reader.push(text[start:end])
        pieces += reader.take()
    answer += reader.finish()
    pieces += reader.take()
    assert text[reader.answer_start :].startswith(answer)
    return "".join(piece.text for piece in pieces), answer


@pytest.mark.parametrize("name", TEXTS)
@given(cuts=st.lists(st.integers(0, 60), max_size=12))
def test_reasoning_and_answer_are_told_apart(name: str, cuts: list[int]) -> None:
    format, prompt_end, text, reasoning, content = TEXTS[name]
    assert read(ReasoningReader(format, prompt_end=prompt_end), text, cuts) == (reasoning, content)


@given(cuts=st.lists(st.integers(0, 400), max_size=20))
def test_a_long_run_of_white_space_is_held_back_for_a_bounded_time(cuts: list[int]) -> None:
    text = "a" + " " * 300 + "b</think>c"
    reasoning, content = read(ReasoningReader(R1), text, cuts)
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


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ content.split('</think>')[-1] }}", "qwen3"),
        ("{% if thinking %}{{ 'Enclose your thoughts in <think> tags.' }}{% endif %}", "qwen3"),
        ("{%- set thinking = thinking | default(false) %}{{ deep_prompt if thinking }}", "qwen3"),
        ("{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>' }}", None),
        ("{{ 'Think step by step before you call a function.' }}", None),
    ],
)
def test_the_template_shows_whether_the_model_reasons(template: str, name: str | None) -> None:
    assert reasoning_format_in(template) == name


@pytest.mark.parametrize(
    ("text", "is_on"),
    [
        ("Put your thoughts inside <think> </think> tags.", True),  # DeepHermes
        ("You are Nemotron.\nDetailed Thinking On", True),
        ("detailed thinking off", False),
        ("Be brief.", False),
    ],
)
def test_the_system_message_switches_reasoning_on(text: str, is_on: bool) -> None:
    assert reasoning_format_asked(["Be kind.", text]) == (QWEN3 if is_on else None)
    assert reasoning_format_asked([]) is None


THOUGHTFUL = wire.Output("", [*b"<think>so</think>4"], "length")
HERMES = "{% if thinking %}{{ 'Enclose your thoughts.' }}{% endif %}" + LLAMA3_TEMPLATE


@pytest.mark.parametrize(
    ("template", "parser", "system", "expected"),
    [
        (LLAMA3_TEMPLATE, None, "detailed thinking on", ("4", "so")),
        (LLAMA3_TEMPLATE, "none", "detailed thinking on", ("<think>so</think>4", None)),
        (LLAMA3_TEMPLATE, None, "Be brief.", ("<think>so</think>4", None)),
        (HERMES, None, "Be brief.", ("4", "so")),
    ],
)
def test_a_chat_whose_model_reasons(template, parser, system, expected) -> None:
    state = state_of(StubClient(THOUGHTFUL), template, reasoning_parser=parser)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "2 + 2?"}]
    message = call(state, "POST", CHAT, json={"messages": messages}).json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning")) == expected
    response = call(state, "POST", "/v1/responses", json={"input": "2 + 2?", "instructions": system}).json()
    assert [item["type"] for item in response["output"]] == ["reasoning"] * (expected[1] is not None) + ["message"]
