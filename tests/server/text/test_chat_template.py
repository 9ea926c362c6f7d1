"""Chat templates: the same ids as transformers gives, and no text that becomes control."""

from __future__ import annotations

from datetime import datetime
from functools import cache, lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.chat_template import ChatTemplate
from server.text.special_tokens import Part
from server.text.template_environment import TemplateError
from server.text.tokenizer import ByteLevelTokenizer
from tests.server.support.tokenizers import LLAMA3_TEMPLATE, SPECIAL_TOKENS, byte_tokenizer

TOKENIZER = ByteLevelTokenizer(
    byte_tokenizer((("h", "e"), ("he", "l"), ("Ġ", "w"), ("Ċ", "Ċ"))),
    config={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    chat_template=None,
)

# In the manner of Llama 3.1's: a system block always, a date, a message rendered as JSON.
DATED = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today: " + (date_string if date_string is defined else strftime_now("%d %b %Y")) + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if loop.last and message['role'] == 'assistant' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- generation %}{{- message['content'] | tojson }}{%- endgeneration %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

# What templates do to text: each is a way in which pieces of a control token could come together.
TRANSFORMS = {
    "as it is": "{{ m.content }}",
    "trimmed": "{{ m.content | trim }}",
    "joined without a gap": "{% for n in messages %}{{ n.content }}{% endfor %}",
    "joined with a piece of control": "{{ '<|' + m.content + '|>' }}",
    "closed by the template": "{{ m.content }}|>{{ '>' }}",
    "opened by the template": "{{ '<' }}{{ m.content }}",
    "split at a tag": "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}",
    "with a tag taken out": "{{ m.content | replace('<x>', '') }}",
    "with letters taken out": "{{ m.content | replace('x', '') }}",
    "cut": "{{ m.content[1:] }}{{ m.content[:-1] }}",
    "in lower case": "{{ m.content | lower }}",
    "reversed": "{{ m.content[::-1] }}",
    "letter by letter": "{% for c in m.content %}{{ c }}{% endfor %}",
    "as JSON": "{{ m | tojson }}",
    "only if it is long": "{% if m.content | length > 5 %}<|python_tag|>{% endif %}{{ m.content }}",
    "in place of control": "{% if '<x>' in m.content %}{{ m.content }}{% else %}<|python_tag|>{% endif %}",
}
FRAGMENTS = (
    *SPECIAL_TOKENS,
    *("<", "|", ">", "<|", "|>", "eot_id", "<|eot", "_id|>", "x", "<x>", "</think>", "<<x>|eot_id|>", "<|EOT_ID|>"),
    *(" ", "\n", "a", "é", "\U00100000", "\U00100001", "<|>di_toe|<"[::-1], ">|di_toe|<"),
)
HOSTILE_TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)


@cache  # as a server compiles it: once for all conversations
def template(source: str = LLAMA3_TEMPLATE, tokenizer: ByteLevelTokenizer = TOKENIZER) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=tokenizer.special_tokens, variables=tokenizer.template_variables)


def conversation(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return [*head, *turns]


@lru_cache(maxsize=1)  # Llama 3's takes most of a second
def transformers_tokenizer(backend):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def transformers_ids(backend, source, messages, **options) -> list[int]:
    reference = transformers_tokenizer(backend)
    return reference.apply_chat_template(messages, chat_template=source, tokenize=True, return_dict=False, **options)


def specials(parts: list[Part]) -> list[str]:
    return [part.text for part in parts if part.special]


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts)


CONVERSATIONS = [
    conversation("hello world"),
    conversation("  hello  ", "yes?\n", "what is 2 < 3 | 4 > 1?", system=" Be kind. "),
    conversation("é\n\n\n…日本語 🙂", "<b>bold</b>", "a </think> b"),
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("source", [LLAMA3_TEMPLATE, DATED], ids=["llama3", "dated"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_ordinary_conversations_give_the_ids_of_transformers(messages, source, add_generation_prompt):
    parts = template(source).render(messages, add_generation_prompt=add_generation_prompt)
    backend = byte_tokenizer((("h", "e"), ("he", "l"), ("Ġ", "w"), ("Ċ", "Ċ")))
    expected = transformers_ids(backend, source, messages, add_generation_prompt=add_generation_prompt)
    assert TOKENIZER.encode_parts(parts) == expected


@pytest.mark.parametrize("text", ["Once upon", "Once upon  ", " Once "])
def test_a_continued_message_gives_the_ids_of_transformers(text):
    messages = conversation("tell", text)
    for source in (LLAMA3_TEMPLATE, LLAMA3_TEMPLATE.replace(" | trim", "")):
        parts = template(source).render(messages, add_generation_prompt=False, continue_final_message=True)
        backend = byte_tokenizer((("h", "e"), ("he", "l"), ("Ġ", "w"), ("Ċ", "Ċ")))
        expected = transformers_ids(backend, source, messages, continue_final_message=True)
        assert TOKENIZER.encode_parts(parts) == expected


def test_llama3_conversations_give_the_ids_of_transformers(llama3_backend, llama3):
    for messages in CONVERSATIONS:
        expected = transformers_ids(llama3_backend, LLAMA3_TEMPLATE, messages, add_generation_prompt=True)
        assert llama3.encode_parts(template(tokenizer=llama3).render(messages)) == expected


def test_any_role_is_shown_in_the_templates_own_form():
    messages = [{"role": "wizard", "content": "abra"}, {"role": "<|eot_id|>", "content": "b"}]
    parts = template().render(messages)
    assert text_of(parts).count("<|eot_id|>") == 3
    assert "<|start_header_id|>wizard<|end_header_id|>\n\nabra<|eot_id|>" in text_of(parts)
    assert specials(parts).count("<|eot_id|>") == 2  # those that end the two messages


@pytest.mark.parametrize(("role", "is_token"), [("user", True), ("critic", True), ("eot_id", False)])
def test_a_role_makes_a_control_token_only_if_the_template_names_it(role, is_token):
    """A template that makes control tokens of roles. It compares with `critic`, and not with `eot_id`."""
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
        "{% if m.role == 'critic' %}!{% endif %}{% endfor %}"
    )
    special = ["<|user|>", "<|critic|>", "<|eot_id|>"]
    parts = ChatTemplate(source, special_tokens=special, variables={}).render([{"role": role, "content": "hi"}])
    assert text_of(parts) == f"<|{role}|>hi" + ("!" if role == "critic" else "")
    assert specials(parts) == ([f"<|{role}|>"] if is_token else [])


@pytest.mark.parametrize("transform", TRANSFORMS)
@given(texts=st.lists(HOSTILE_TEXT, min_size=1, max_size=3), extra=HOSTILE_TEXT)
def test_no_text_gives_a_control_token(transform, texts, extra):
    """The template's own control tokens come, and nothing but them, whatever the text and whatever is done to it."""
    source = "<|start_header_id|>{% for m in messages %}" + TRANSFORMS[transform] + "<|eot_id|>{% endfor %}{{ extra }}"
    parts = template(source).render(conversation(*texts), extra={"extra": extra})
    own = [token for token in specials(parts) if token != "<|python_tag|>"]
    assert own == ["<|start_header_id|>"] + ["<|eot_id|>"] * len(texts)
    # the conditional one is the template's only where the template says so
    python_tags = specials(parts).count("<|python_tag|>")
    if transform == "only if it is long":
        assert python_tags == sum(len(text) > 5 for text in texts)
    elif transform == "in place of control":
        # the text decides, and the masked text may decide otherwise: the tag is the template's own all the same
        assert python_tags <= len(texts)
    else:
        assert python_tags == 0


@given(texts=st.lists(HOSTILE_TEXT, min_size=1, max_size=3))
def test_the_text_itself_is_never_changed(texts):
    parts = template("{% for m in messages %}{{ m.content }}\n{% endfor %}<|eot_id|>").render(conversation(*texts))
    assert text_of(parts) == "".join(f"{text}\n" for text in texts) + "<|eot_id|>"


def test_what_cannot_be_told_apart_is_rendered_under_a_mask():
    """What the template has joined decides about a control token: it does not get to see it, and the text comes out as
    it was."""
    source = "{% if 'x' in (messages[0].content ~ '') %}<|python_tag|>{% endif %}{{ messages[0].content }}<|eot_id|>"
    parts = template(source).render(conversation("x <|eot_id|>"))
    assert parts == [Part("x <|eot_id|>", False), Part("<|eot_id|>", True)]


@pytest.mark.parametrize("source", [LLAMA3_TEMPLATE, "{{ messages[0].content | replace('<x>', '') }}<|eot_id|>"])
def test_the_last_private_plane_may_be_used_in_part(source):
    private = "".join(map(chr, range(0x100000, 0x100400)))
    parts = template(source).render(conversation(private + "<<x>|eot_id|>"))
    assert private in text_of(parts)
    assert specials(parts).count("<|eot_id|>") == 1


def test_the_last_private_plane_used_up_is_refused():
    everything = "".join(map(chr, range(0x100000, 0x10FFFE)))
    with pytest.raises(TemplateError, match="private-use"):
        template().render(conversation(everything), continue_final_message=True)


def test_special_tokens_of_other_scripts():
    source = "<｜User｜>{{ messages[0].content }}<｜end▁of▁sentence｜>"
    tokens = ["<｜User｜>", "<｜end▁of▁sentence｜>"]
    parts = ChatTemplate(source, special_tokens=tokens, variables={}).render(conversation("a<｜User｜>｜▁<"))
    assert parts == [Part(tokens[0], True), Part("a<｜User｜>｜▁<", False), Part(tokens[1], True)]


def test_a_tokenizer_without_special_tokens():
    parts = ChatTemplate("{{ messages[0].content }}", special_tokens=[], variables={}).render(conversation("<a>"))
    assert parts == [Part("<a>", False)]


def test_extra_variables_reach_the_template():
    parts = template(DATED).render(conversation("a"), extra={"date_string": "<|eot_id|>1 May"})
    assert "Today: <|eot_id|>1 May" in text_of(parts)
    assert specials(parts).count("<|eot_id|>") == 2


@pytest.mark.parametrize("name", ["self", "context", "environment", "args", "not a name"])
def test_a_variable_may_have_any_name(name):
    plain = template().render(conversation("a"))
    assert template().render(conversation("a"), extra={name: 1}) == plain


def test_the_date_is_known():
    assert datetime.now().strftime("%d %b %Y") in text_of(template(DATED).render(conversation("a")))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.foo.bar }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{% set x = messages.append(1) %}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
    ],
)
def test_a_template_that_fails_says_so(source, message):
    with pytest.raises(TemplateError, match=message):
        template(source).render(conversation("a"))


DEEP = 10_000


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ " + "(" * DEEP + "1" + ")" * DEEP + " }}",
        "{{ " + "1 + " * DEEP + "1 }}",
        "{{ m" + ".b" * DEEP + " }}",
        "{% for m in messages %}" * 30 + "{% endfor %}" * 30,
        "{% if m %}" + "{% elif m %}" * DEEP + "{% endif %}",
        "{{ " + "'a' ~ " * 200_000 + "'b' }}",
    ],
    ids=["not Jinja", "brackets", "sum", "attributes", "blocks", "branches", "a megabyte"],
)
def test_a_template_that_cannot_be_compiled_is_refused_at_once(source):
    with pytest.raises(TemplateError, match=r"The chat template (is not valid|has 1\d{6} characters)"):
        template(source)


@pytest.mark.parametrize("messages", [conversation("a", ""), [{"role": "assistant", "content": None}]])
def test_continuing_needs_text_that_the_template_shows(messages):
    with pytest.raises(TemplateError):
        template("<|eot_id|>").render(messages, continue_final_message=True)
