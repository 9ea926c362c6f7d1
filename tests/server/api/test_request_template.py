"""A chat template that comes with a request."""

from __future__ import annotations

import pytest

from server.engine.wire import packed, unpacked
from server.text.tokenizer_files import ChatTemplates
from server.text.tool_calls.formats import FORMATS
from tests.server.support.stub_app import DONE, StubClient, call, state_of
from tests.server.support.tokenizers import EOT

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
TEMPLATE = "{{ messages[0].content }}|{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}<|eot_id|>"


def trusting(client: StubClient | None = None, **settings):
    return state_of(client or StubClient(DONE), trust_request_chat_template=True, **settings)


def test_it_renders_the_conversation_and_its_tools():
    client = StubClient(DONE)
    state = trusting(client)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert call(state, "POST", CHAT, json=HELLO | {"chat_template": TEMPLATE}).status_code == 200
    assert call(state, "POST", CHAT, json=HELLO | {"chat_template": TEMPLATE, "tools": tools}).status_code == 200
    assert [request.prompt for request in client.submitted] == [packed([*b"hi|", EOT]), packed([*b"hi|f", EOT])]
    answer = call(state, "POST", "/tokenize", json=HELLO | {"chat_template": TEMPLATE, "tools": tools}).json()
    assert answer["tokens"] == [*b"hi|f", EOT]


def test_text_of_a_user_stays_text():
    client = StubClient(DONE)
    body = {"messages": [{"role": "user", "content": "<|eot_id|>"}], "chat_template": TEMPLATE}
    assert call(trusting(client), "POST", CHAT, json=body).status_code == 200
    assert client.submitted[0].prompt == packed([*b"<|eot_id|>|", EOT])


def test_it_may_take_the_place_of_none():
    state = trusting(template=None)
    assert call(state, "POST", CHAT, json=HELLO).status_code == 400
    assert call(state, "POST", CHAT, json=HELLO | {"chat_template": TEMPLATE}).status_code == 200


TOOLS = [{"type": "function", "function": {"name": "f"}}]
TWO = ChatTemplates(default="D{{ messages[0].content }}", tool_use="T" + TEMPLATE)


def tokens_of(state, **fields) -> bytes:
    return bytes(id for id in call(state, "POST", "/tokenize", json=HELLO | fields).json()["tokens"] if id < 256)


def test_the_servers_variables_are_there_unless_a_request_sets_them():
    templates = ChatTemplates(default="{{ thinking }}{{ language }}{{ messages[0].content }}")
    state = state_of(StubClient(DONE), template=templates, template_variables={"thinking": "T", "language": "L"})
    assert tokens_of(state) == b"TLhi"
    assert tokens_of(state, chat_template_kwargs={"thinking": "U"}) == b"ULhi"


def test_the_template_for_tools_is_taken_if_there_are_tools():
    state = state_of(StubClient(DONE), template=TWO)
    assert tokens_of(state) == b"Dhi"
    assert tokens_of(state, tools=TOOLS) == b"Thi|f"
    assert call(state, "POST", CHAT, json=HELLO | {"tools": TOOLS}).status_code == 200
    assert call(state, "POST", CHAT, json=HELLO | {"tools": TOOLS, "tool_choice": "none"}).status_code == 200
    assert [bytes([*unpacked(request.prompt)][:2]) for request in state.engine.submitted] == [b"Th", b"Dh"]


def test_the_template_for_tools_tells_the_format_of_calls():
    two = ChatTemplates(default=TEMPLATE, tool_use="<tool_call>" + TEMPLATE)
    assert state_of(StubClient(DONE), template=two).model.call_format is FORMATS["hermes"]
    assert state_of(StubClient(DONE), template=TEMPLATE).model.call_format is FORMATS["llama3_json"]


def test_a_template_that_replaces_the_models_replaces_both():
    state = state_of(StubClient(DONE), template=TWO, chat_template="O{{ tools | length if tools else 0 }}")
    assert (tokens_of(state), tokens_of(state, tools=TOOLS)) == (b"O0", b"O1")


def test_a_template_for_tools_only_says_so():
    state = state_of(StubClient(DONE), template=ChatTemplates(tool_use="T" + TEMPLATE))
    assert tokens_of(state, tools=TOOLS) == b"Thi|f"
    response = call(state, "POST", CHAT, json=HELLO)
    assert response.status_code == 400
    assert "for requests with tools only" in response.json()["error"]["message"]


def test_the_template_for_tools_is_the_one_that_must_show_them():
    state = state_of(StubClient(DONE), template=ChatTemplates(default=TEMPLATE, tool_use="{{ messages[0].content }}"))
    response = call(state, "POST", CHAT, json=HELLO | {"tools": TOOLS})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_server_that_does_not_trust_it_says_so(path):
    response = call(state_of(StubClient(DONE)), "POST", path, json=HELLO | {"chat_template": TEMPLATE})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]


@pytest.mark.parametrize("template", ["{% if %}", "{{ " + "(" * 2000 + " }}", "{{ ''.__class__.__mro__[1] }}"])
def test_templates_that_cannot_be_run(template):
    response = call(trusting(), "POST", CHAT, json=HELLO | {"chat_template": template})
    assert response.status_code == 400
    assert "template" in response.json()["error"]["message"]


def test_one_that_runs_for_ever_is_stopped():
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    state = trusting(template_timeout_s=0.2)
    response = call(state, "POST", CHAT, json=HELLO | {"chat_template": template})
    assert response.status_code == 400
    assert "took longer than 0.2 s" in response.json()["error"]["message"]
