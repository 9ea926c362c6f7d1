"""Templates that branch on the users' values: the ids of transformers for every text and schema without the text of a
special token, and for no other a control token that is not the template's own."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from scripts.lab.demo.tokenizer import CHAT_TEMPLATE as DEMO_TEMPLATE
from server.text.chat_template import ChatTemplate
from server.text.template_environment import TemplateError
from server.text.tokenizer import ByteLevelTokenizer
from tests.examples import examples
from tests.server.support import tokenizers
from tests.server.text.test_chat_template import DATED, FRAGMENTS, specials, text_of, transformers_ids

TOKENS = (*tokenizers.SPECIAL_TOKENS, *tokenizers.HERMES_TOKENS)
# It looks values up, compares them, searches them, sorts them and cuts them, and does so with what it has cut.
LOOKING = """
{%- for tool in tools or [] %}{% for name, schema in tool.function.parameters.properties | dictsort %}
    {{- {"string": "<|im_start|>", "array": "<|im_end|>"}.get(schema.type, "?") }}
    {%- if schema.type is string and schema.type.startswith("int") %}{{ schema.type[:3] }}{% endif %}
{%- endfor %}{% endfor %}
{%- for message in messages %}
    {%- set text = message.content | trim %}
    {%- if "\\n\\n" in text %}{{ "<|eot_id|>" }}{{ text.split("\\n\\n")[-1] }}{% endif %}
    {%- if text[:1] == "<" or text | lower == "a" or text.endswith((">", "é")) %}{{ "<|python_tag|>" }}{% endif %}
    {{- text }}{{ "<|eot_id|>" }}
{%- endfor %}
"""
TEMPLATES = {
    "llama 3": tokenizers.LLAMA3_TEMPLATE,
    "llama 3.1": tokenizers.TOOL_TEMPLATE,
    "dated": DATED,
    "hermes": tokenizers.HERMES_TEMPLATE,
    "demo": DEMO_TEMPLATE,
    "looking": LOOKING,
}


def backend():
    built = tokenizers.byte_tokenizer((("h", "e"), ("Ċ", "Ċ")))
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokenizers.HERMES_TOKENS])
    return built


TOKENIZER = ByteLevelTokenizer(
    backend(), config={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, chat_template=None
)


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(
        TEMPLATES[name], special_tokens=TOKENIZER.special_tokens, variables=TOKENIZER.template_variables
    )


def schemas(text: st.SearchStrategy[str]) -> st.SearchStrategy[dict]:
    plain = st.sampled_from(["string", "number", "integer", "boolean"])
    leaves = st.fixed_dictionaries(
        {"type": plain | st.lists(plain, min_size=1, max_size=2)},
        optional={"description": text, "enum": st.lists(text, max_size=2), "default": text | st.integers()},
    )

    def deeper(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
        return (
            st.fixed_dictionaries({"type": st.just("array")}, optional={"items": inner, "title": text})
            | st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=2)}, optional={"description": text})
            | st.fixed_dictionaries(
                {"type": st.just("object")},
                optional={"additionalProperties": inner | st.booleans(), "properties": st.dictionaries(text, inner)},
            )
        )

    return st.recursive(leaves, deeper, max_leaves=3)


def conversations(text: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[list[dict], list[dict]]]:
    """Messages with calls and results, and tools."""
    properties = st.dictionaries(text, schemas(text), max_size=3)
    functions = st.fixed_dictionaries(
        {
            "name": text,
            "description": text,
            "parameters": st.fixed_dictionaries({"type": st.just("object"), "properties": properties}),
        }
    )
    tools = st.lists(functions.map(lambda function: {"type": "function", "function": function}), max_size=2)
    calls = st.fixed_dictionaries({"name": text, "arguments": st.dictionaries(text, text | st.integers(), max_size=2)})

    def messages(asked: str, call: dict, result: str, answer: str) -> list[dict]:
        calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        return [
            {"role": "system", "content": asked},
            {"role": "user", "content": asked},
            calling,
            {"role": "tool", "name": call["name"], "content": result},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": result},
        ]

    return st.tuples(st.builds(messages, text, calls, text, text), tools)


def no_special(text: str) -> bool:
    return not any(token in text for token in TOKENS)


ORDINARY = (st.text(max_size=8) | st.lists(st.sampled_from(FRAGMENTS), max_size=4).map("".join)).filter(no_special)
HOSTILE = st.lists(st.sampled_from((*FRAGMENTS, *tokenizers.HERMES_TOKENS)), max_size=4).map("".join)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(60))
@given(chat=conversations(ORDINARY))
def test_texts_and_schemas_without_special_tokens_give_the_ids_of_transformers(name, chat):
    messages, tools = chat
    options = {"add_generation_prompt": True, "tools": tools or None}
    try:
        expected = transformers_ids(backend(), TEMPLATES[name], messages, **options)
    except TypeError:  # "looking" looks up the type of a schema, which may be a list
        with pytest.raises(TemplateError, match="unhashable"):
            template(name).render(messages, extra={"tools": tools})
        return
    rendered = template(name).render(messages, extra={"tools": tools} if tools else {})
    assert TOKENIZER.encode_parts(rendered) == expected


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "looking"])
@settings(max_examples=examples(40))
@given(chat=conversations(HOSTILE), data=st.data())
def test_special_tokens_in_texts_and_schemas_are_text(name, chat, data):
    """With each text in place of another that is harmless, the control tokens are the same, and the text is there."""
    messages, tools = chat
    parts = template(name).render(messages, extra={"tools": tools} if tools else {})
    texts: dict[str, str] = {}

    def harmless(text: str) -> str:
        kept = text in ("string", "number", "integer", "boolean", "array", "object", "function")
        return text if kept else texts.setdefault(text, f"{len(texts)}")

    def all_harmless(value):
        if isinstance(value, dict):
            return {harmless_key(key): all_harmless(item) for key, item in value.items()}
        if isinstance(value, list):
            return list(map(all_harmless, value))
        return harmless(value) if isinstance(value, str) else value

    def harmless_key(key: str) -> str:
        return harmless(key) if any(token[:1] in key or "|" in key for token in TOKENS) else key

    plain = [{**all_harmless(message), "role": message["role"]} for message in messages]
    own = template(name).render(plain, extra={"tools": all_harmless(tools)} if tools else {})
    assert specials(parts) == specials(own)
    ids = TOKENIZER.encode_parts(parts)
    assert b"".join(TOKENIZER.token_bytes[id] for id in ids).decode() == text_of(parts)
    assert [id for id in ids if id in TOKENIZER.special_ids] == [TOKENIZER.special_tokens[it] for it in specials(own)]


def test_a_template_that_does_not_end_says_so():
    """As in transformers: it is the template's own fault."""
    parameters = {"type": "object", "properties": {"city": {"type": "unknown"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}
    with pytest.raises(TemplateError, match="recursion"):
        template("hermes").render([{"role": "user", "content": "a"}], extra={"tools": [tool]})
