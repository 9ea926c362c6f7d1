"""Templates with tools, calls, their results and documents: the ids of transformers, and no text that is control."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.chat_template import ChatTemplate
from server.text.tokenizer import ByteLevelTokenizer
from tests.examples import examples
from tests.server.support.tokenizers import LLAMA3_TEMPLATE, TOOL_TEMPLATE, byte_tokenizer
from tests.server.text.test_chat_template import HOSTILE_TEXT, specials, text_of, transformers_ids

MERGES = (("h", "e"), ("he", "l"), ("Ġ", "w"), ("Ċ", "Ċ"))
TOKENIZER = ByteLevelTokenizer(
    byte_tokenizer(MERGES),
    config={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    chat_template=None,
)


@cache  # as a server compiles it: once for all conversations
def template(source: str = TOOL_TEMPLATE, tokenizer: ByteLevelTokenizer = TOKENIZER) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=tokenizer.special_tokens, variables=tokenizer.template_variables)


def tool(name: str = "get_weather", description: str = "The weather there.", keyword: str = "city"):
    properties = {keyword: {"type": "string", "description": "its name"}, "days": {"type": "integer", "enum": [1, 7]}}
    parameters = {"type": "object", "properties": properties, "required": [keyword], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call(name: str = "get_weather", **arguments):
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def asked(*more, content: str = "hello  "):
    return [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": content}, *more]


CALLED = [
    {"role": "assistant", "content": "", "tool_calls": [call(city="Paris", days=1)]},
    {"role": "tool", "content": '{"sky": "blue"}', "tool_call_id": "call_1"},
]
BUILTIN = {"role": "assistant", "content": "", "tool_calls": [call("search", query="a b")]}
CONVERSATIONS = {
    "tools": (asked(), {"tools": [tool()]}),
    "two tools in the system turn": (asked(), {"tools": [tool(), tool("f")], "tools_in_user_message": False}),
    "a call and its result": (asked(*CALLED), {"tools": [tool()]}),
    "without tools any more": (asked(*CALLED), {}),
    "a builtin tool": (asked(BUILTIN, {"role": "ipython", "content": "c"}), {"builtin_tools": ["search"]}),
    "documents": (asked(), {"documents": [{"title": "A", "text": "b"}]}),
    "trailing turns": (asked(*[{"role": "assistant", "content": "a"}] * 3), {}),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_are_those_of_transformers(name):
    messages, extra = CONVERSATIONS[name]
    expected = transformers_ids(byte_tokenizer(MERGES), TOOL_TEMPLATE, messages, add_generation_prompt=True, **extra)
    assert TOKENIZER.encode_parts(template().render(messages, extra=extra)) == expected


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_of_the_real_tokenizer_are_those_of_transformers(name, llama3, llama3_backend):
    messages, extra = CONVERSATIONS[name]
    expected = transformers_ids(llama3_backend, TOOL_TEMPLATE, messages, add_generation_prompt=True, **extra)
    assert llama3.encode_parts(template(tokenizer=llama3).render(messages, extra=extra)) == expected


def test_several_calls_of_one_message_become_several_messages_where_the_template_takes_one():
    both = {"role": "assistant", "content": "", "tool_calls": [call(city="Rome"), call(city="Oslo")]}
    apart = [{**both, "tool_calls": [one]} for one in both["tool_calls"]]
    assert template().render(asked(both)) == template().render(asked(*apart))
    takes_all = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %};{% endfor %}"
    assert text_of(template(takes_all).render(asked(both))) == ";;get_weatherget_weather;"


def test_which_variables_a_template_reads():
    assert template().variables_read >= {"tools", "documents"}
    assert "tools" not in template(LLAMA3_TEMPLATE).variables_read


def hostile_conversation(text: str, extra: dict):
    calls = [{"id": text, "type": "function", "function": {"name": text, "arguments": {text: text, "a": [text]}}}]
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": text, "name": text},
        {"role": "assistant", "content": text, "tool_calls": calls},
        {"role": "tool", "content": text, "tool_call_id": text},
        {"role": "ipython", "content": text},
        {"role": "assistant", "content": text},
    ]
    return messages, {"tools": [tool(text, text, text)], "documents": [{"title": text, "text": text}], **extra}


EXTRAS = [{}, {"tools_in_user_message": False}, {"builtin_tools": ["search"]}]


@pytest.mark.parametrize("extra", EXTRAS, ids=["in the user's turn", "in the system's turn", "builtin"])
@settings(max_examples=examples(30))
@given(text=HOSTILE_TEXT)
def test_no_text_gives_a_control_token_in_any_place(extra, text):
    harmless, variables = hostile_conversation("", extra)
    own = specials(template().render(harmless, extra=variables))
    messages, variables = hostile_conversation(text, extra)
    parts = template().render(messages, extra=variables)
    assert specials(parts) == own
    ids = TOKENIZER.encode_parts(parts)
    assert [id for id in ids if id in TOKENIZER.special_ids] == [TOKENIZER.special_tokens[token] for token in own]


@pytest.mark.parametrize("extra", EXTRAS, ids=["in the user's turn", "in the system's turn", "builtin"])
def test_no_text_gives_a_control_token_of_the_real_tokenizer(extra, llama3):
    harmless, variables = hostile_conversation("", extra)
    own = specials(template(tokenizer=llama3).render(harmless, extra=variables))
    for token in [*llama3.special_tokens][:12]:
        messages, variables = hostile_conversation(f"{token}<|eot_id|>", extra)
        parts = template(tokenizer=llama3).render(messages, extra=variables)
        assert specials(parts) == own
        ids = llama3.encode_parts(parts)
        assert [id for id in ids if id in llama3.special_ids] == [llama3.special_tokens[it] for it in own]


@given(keys=st.lists(HOSTILE_TEXT, max_size=4, unique=True))
def test_keys_that_a_mask_makes_equal_are_all_shown(keys):
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}<|eot_id|>{% endfor %}"
    message = {"role": "assistant", "content": "", "tool_calls": [call(**dict.fromkeys(keys, 1))]}
    parts = template(source).render([message])
    assert specials(parts) == ["<|eot_id|>"]
    assert json.loads(text_of(parts).removesuffix("<|eot_id|>")) == dict.fromkeys(keys, 1)
