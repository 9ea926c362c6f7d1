"""/v1/completions through real sockets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.server.conftest import REPLY
from tests.server.support.tokenizers import SPECIAL_TOKENS, VOCAB_SIZE

PATH = "/v1/completions"


def post(server, **fields):
    return server.post(PATH, {"prompt": "hello", **fields})


def choices(server, **fields):
    response = post(server, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def events(server, **fields):
    return server.events(PATH, {"prompt": "hello", **fields})


def text(chunks, index=0):
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_the_official_client_gets_an_answer(scripted):
    answer = scripted.client().completions.create(model="test-model", prompt="hello", max_tokens=100)
    assert answer.choices[0].text == REPLY
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 6  # begin-of-text and five bytes
    assert answer.id.startswith("cmpl-")


def test_the_official_client_gets_a_stream(scripted):
    stream = scripted.client().completions.create(model="test-model", prompt="hello", max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == REPLY


def test_a_streams_chunks_are_objects_of_the_same_shape(scripted):
    chunks = events(scripted, max_tokens=100)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert ends == [None] * (len(ends) - 1) + ["stop"]


def test_sixteen_tokens_unless_told_otherwise(scripted):
    answer = post(scripted).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_default_shrinks_to_what_fits(echo):
    answer = post(echo, prompt=[65] * 4090).json()
    assert answer["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": 4090,
        "completion_tokens": 6,
        "total_tokens": 4096,
        "prompt_tokens_details": 0,
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["abab"]),
        (["ab", "cd"], ["abab", "cdcd"]),
        ([97, 98], ["abab"]),
        ([[97, 98], [99, 100]], ["abab", "cdcd"]),
    ],
)
def test_the_four_forms_of_a_prompt(echo, prompt, texts):
    fields = {"prompt": prompt, "max_tokens": 4, "add_special_tokens": False}
    assert [choice["text"] for choice in choices(echo, **fields)] == texts


def test_several_prompts_and_choices_come_prompt_by_prompt(echo):
    answer = post(echo, prompt=["ab", "cde"], n=2, max_tokens=2, add_special_tokens=False).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "ab"),
        (1, "ab"),
        (2, "cd"),
        (3, "cd"),
    ]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 8


def test_several_prompts_can_be_streamed(echo):
    chunks = events(echo, prompt=["ab", "cd"], n=2, max_tokens=4, add_special_tokens=False)
    assert [text(chunks, i) for i in range(4)] == ["abab", "abab", "cdcd", "cdcd"]


def test_a_raw_prompt_may_hold_control_tokens(echo):
    counts = [
        post(echo, prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens"] for prompt in ("<|eot_id|>", "a")
    ]
    assert counts == [2, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_text(scripted, stream):
    fields = {"echo": True, "max_tokens": 100}
    shown = text(events(scripted, **fields)) if stream else choices(scripted, **fields)[0]["text"]
    assert shown == "hello" + REPLY


def test_echo_of_token_ids_decodes_them(scripted):
    assert choices(scripted, prompt=[256, 104, 105], echo=True, max_tokens=1)[0]["text"] == "<|begin_of_text|>hiH"


def test_a_prompt_that_a_template_has_rendered_gets_no_second_begin_of_text(scripted):
    counts = [
        post(scripted, prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens"]
        for prompt in ("hi", "<|begin_of_text|>hi", "<|begin_of_text|><|begin_of_text|>hi")
    ]
    assert counts == [3, 3, 4]


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_the_prompt_alone(scripted, stream, logprobs):
    fields = {"echo": True, "max_tokens": 0, "logprobs": logprobs}
    if stream:
        chunks = events(scripted, **fields, stream_options={"include_usage": True})
        assert text(chunks) == "hello"
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert chunks[-1]["usage"]["completion_tokens"] == 0
        return
    answer = post(scripted, **fields).json()
    assert answer["choices"][0]["text"] == "hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    if logprobs is not None:
        assert answer["choices"][0]["logprobs"]["tokens"] == ["<|begin_of_text|>", *"hello"]


def test_logprobs_with_echo_cover_the_prompt(scripted):
    logprobs = choices(scripted, prompt="hé", echo=True, max_tokens=2, logprobs=1)[0]["logprobs"]
    assert logprobs["tokens"] == ["<|begin_of_text|>", "h", "bytes:\\xc3", "bytes:\\xa9", "H", "bytes:\\xc3"]
    assert logprobs["token_logprobs"] == [None, *[-0.5] * 5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"h": -0.5}
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3]


def test_streamed_logprobs_are_those_of_the_whole(scripted):
    fields = {"echo": True, "max_tokens": 30, "logprobs": 2}
    whole = choices(scripted, **fields)[0]["logprobs"]
    parts = [c["logprobs"] for chunk in events(scripted, **fields) for c in chunk["choices"] if c["logprobs"]]
    assert {name: [x for part in parts for x in part[name]] for name in whole} == whole


@pytest.mark.parametrize(("logprobs", "counts"), [(0, {1}), (3, {3, 4})])
def test_the_number_of_top_logprobs(scripted, logprobs, counts):
    entries = choices(scripted, logprobs=logprobs)[0]["logprobs"]["top_logprobs"]
    assert {len(entry) for entry in entries} <= counts


def check_offsets(choice, hidden: tuple[str, ...] = ()) -> None:
    """Each token stands at its offset. `hidden`: the first and the last tokens that do not stand in the text."""
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        found = choice["text"][offset:]
        if not token.startswith("bytes:"):
            assert found.startswith(token) or token in hidden
        else:
            raw = bytes(int(each, 16) for each in token.split("\\x")[1:])
            assert raw in found[0].encode() or found[0] == "\ufffd"


MIXED_TEXT = st.lists(st.text(max_size=6) | st.sampled_from(SPECIAL_TOKENS), min_size=1, max_size=6).map("".join)
PROMPTS = MIXED_TEXT | st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20)


@settings(max_examples=examples(40))
@given(PROMPTS.filter(len), st.booleans(), st.sampled_from([None, 5]))
def test_each_token_of_an_echoed_prompt_stands_at_its_offset(scripted, prompt, stream, kept):
    """Special tokens, too, except the one that the tokenizer has added to a text."""
    fields = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 8, "truncate_prompt_tokens": kept}
    if stream:
        parts = [chunk["choices"][0] for chunk in events(scripted, **fields)]
        scores = [part["logprobs"] for part in parts if part["logprobs"]]
        logprobs = {name: [each for score in scores for each in score[name]] for name in ("tokens", "text_offset")}
        choice = {"text": "".join(part["text"] for part in parts), "logprobs": logprobs}
    else:
        (choice,) = choices(scripted, **fields)
    logprobs = choice["logprobs"]
    is_added = logprobs["tokens"][0] == "<|begin_of_text|>" and logprobs["text_offset"][:2] == [0, 0]
    if isinstance(prompt, str) and choice["text"].startswith(prompt) and is_added:
        logprobs = {name: values[1:] for name, values in logprobs.items()}
    check_offsets(choice | {"logprobs": logprobs})


def test_prompt_logprobs_of_every_prompt(scripted):
    both = choices(scripted, prompt=["ab", "c"], prompt_logprobs=2, max_tokens=1)
    assert [len(choice["prompt_logprobs"]) for choice in both] == [3, 2]
    assert both[0]["prompt_logprobs"][1] == {
        "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
    }
