"""/v1/messages through real sockets: with Anthropic's own client where it is installed, and without it."""

from __future__ import annotations

import json

import pytest

from tests.server.support.echo_engine import EchoConfig
from tests.server.support.running import ECHO, running_server, server_of
from tests.server.support.sse_events import parse_named_events
from tests.server.support.tokenizers import TOOL_TEMPLATE

PATH = "/v1/messages"
ARGUMENTS = '{"city": "Århus"}'
CALL = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
SCRIPTS = {"plain": "Fine, thänks 🙂.", "call": CALL, "both": f"Let me see. {CALL}; {CALL} Done.", "nothing": ""}
SEEDS = {name: seed for seed, name in enumerate(SCRIPTS)}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
HELLO = [{"role": "user", "content": "hello"}]
W = ("get_weather", {"city": "Århus"})
EXPECTED = {
    "plain": ([SCRIPTS["plain"]], "end_turn"),
    "call": ([W], "tool_use"),
    "both": (["Let me see. ", W, W, " Done."], "tool_use"),
    "nothing": ([], "end_turn"),
}


server = server_of(
    EchoConfig(reply=(), replies=tuple(tuple(text.encode()) for text in SCRIPTS.values())), template=TOOL_TEMPLATE
)
repeater = server_of(EchoConfig(), template=TOOL_TEMPLATE)


def post(server, script: str = "plain", path: str = PATH, **fields):
    body = {"messages": HELLO, "max_tokens": 500, "seed": SEEDS[script], **fields}
    return server.post(path, body)


def created(server, script: str = "plain", **fields):
    response = post(server, script, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(server, script: str = "plain", **fields):
    response = post(server, script, stream=True, **fields)
    assert response.status_code == 200, response.text
    return parse_named_events(response.text)


def blocks_of(content):
    return [block["text"] if block["type"] == "text" else (block["name"], block["input"]) for block in content]


def put_together(found):
    """The blocks of a stream, as clients make them of its events."""
    blocks = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append([event["content_block"], ""])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            blocks[-1][1] += event["delta"].get("text") or event["delta"].get("partial_json") or ""
    return [text if block["type"] == "text" else (block["name"], json.loads(text)) for block, text in blocks]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_message_is_the_same_streamed_and_whole(server, script):
    blocks, reason = EXPECTED[script]
    whole = created(server, script, tools=[WEATHER])
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "test-model")
    assert (blocks_of(whole["content"]), whole["stop_reason"], whole["stop_sequence"]) == (blocks, reason, None)
    found = events(server, script, tools=[WEATHER])
    assert put_together(found) == blocks
    assert [found[0]["type"], found[-2]["type"], found[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert found[-2]["delta"] == {"stop_reason": reason, "stop_sequence": None}
    assert found[-2]["usage"] == whole["usage"]
    assert whole["usage"]["output_tokens"] == len(SCRIPTS[script].encode()) + 1
    assert found[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    starts = [event["type"] for event in found].count("content_block_start")
    assert starts == [event["type"] for event in found].count("content_block_stop") == len(blocks)


def test_why_a_message_ends(server):
    assert created(server, max_tokens=3)["stop_reason"] == "max_tokens"
    stopped = created(server, stop_sequences=["than", "thä"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "thä")
    assert blocks_of(stopped["content"]) == ["Fine, "]


@pytest.mark.parametrize("choice", ["auto", "any"])
@pytest.mark.parametrize("cut", [{"max_tokens": CALL.index("rhus")}, {"stop_sequences": ["rhus"]}])
def test_a_call_that_is_cut_leaves_no_block(server, choice, cut):
    fields = {"tools": [WEATHER], "tool_choice": {"type": choice}, **cut}
    whole = created(server, "call", **fields)
    reason = "max_tokens" if "max_tokens" in cut else "stop_sequence"
    assert whole["stop_reason"] == reason
    if choice == "any" and "max_tokens" in cut:
        (block,) = whole["content"]
        assert (block["type"], block["name"]) == ("tool_use", "get_weather")
        assert ARGUMENTS.startswith(block["input"]["arguments"].rstrip("\N{REPLACEMENT CHARACTER}"))
    else:
        assert whole["content"] == []
    found = events(server, "call", **fields)
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    sent = "".join(delta["partial_json"] for delta in deltas)
    assert ARGUMENTS.startswith(sent.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert found[-2]["delta"]["stop_reason"] == reason


def num_chat_tokens(server, messages, **fields):
    return server.post("/tokenize", {"messages": messages, **fields}).json()["count"]


@pytest.mark.parametrize("content", ["47 + 35 =", [{"type": "text", "text": "47 + 35 ="}]])
def test_a_last_message_of_the_assistant_is_the_beginning_of_the_answer(server, content):
    messages = [*HELLO, {"role": "assistant", "content": content}]
    continued = num_chat_tokens(server, messages, continue_final_message=True, add_generation_prompt=False)
    assert continued == num_chat_tokens(server, messages, add_generation_prompt=False) - 1  # the end of the turn
    whole = created(server, messages=messages)
    assert (blocks_of(whole["content"]), whole["usage"]["input_tokens"]) == ([SCRIPTS["plain"]], continued)
    assert put_together(events(server, messages=messages)) == [SCRIPTS["plain"]]
    counted = post(server, path=f"{PATH}/count_tokens", messages=messages).json()
    assert counted == {"input_tokens": continued}


@pytest.mark.parametrize("content", ["", []])
def test_an_empty_last_message_is_no_beginning(server, content):
    messages = [*HELLO, {"role": "assistant", "content": content}]
    assert created(server, messages=messages)["usage"] == created(server)["usage"]


FORMAT = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
NOT_CONTINUED = {
    "trailing whitespace": ("47 + 35 = ", {}),
    "trailing whitespace in a block": ([{"type": "text", "text": "47\n"}], {}),
    "a call": ([{"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}], {"tools": [WEATHER]}),
    "an output format": ("{", FORMAT),
}


@pytest.mark.parametrize("name", NOT_CONTINUED)
def test_beginnings_that_anthropic_refuses(server, name):
    content, fields = NOT_CONTINUED[name]
    response = post(server, messages=[*HELLO, {"role": "assistant", "content": content}], **fields)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    said = response.json()["error"]["message"]
    assert ("output_config.format" if name == "an output format" else "messages.1.content") in said
    assert ("final assistant content cannot end with trailing whitespace" in said) == name.startswith("trailing")


def test_tokens_are_counted_without_an_answer(server):
    counted = post(server, path=f"{PATH}/count_tokens", tools=[WEATHER], system="Be kind.").json()
    assert counted == {"input_tokens": created(server, tools=[WEATHER], system="Be kind.")["usage"]["input_tokens"]}


def test_a_conversation_goes_on_after_a_call(server):
    first = created(server, "call", tools=[WEATHER])
    result = {
        "type": "tool_result",
        "tool_use_id": first["content"][0]["id"],
        "content": [{"type": "text", "text": "5"}],
    }
    turns = [*HELLO, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = created(server, tools=[WEATHER], messages=turns)
    chat = [
        *HELLO,
        {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": ARGUMENTS}}]},
        {"role": "tool", "content": "5"},
    ]
    function = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
    with server.http() as http:
        tools = [{"type": "function", "function": function}]
        counted = http.post("/tokenize", json={"messages": chat, "tools": tools}).json()["count"]
    assert second["usage"]["input_tokens"] == counted


def test_what_a_coding_agent_sends_is_taken(server):
    """The fields of Claude Code: reasoning, edits of the context, effort, tools of Anthropic's server."""
    thinking = [
        {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
        {"type": "redacted_thinking", "data": "abc"},
        {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_use", "id": "a", "name": "get_weather", "input": {}},
    ]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "5"}, IMAGE]}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "More tools."},
        {"role": "assistant", "content": thinking},
        {"role": "user", "content": [result]},
    ]
    answer = created(
        server,
        "call",
        messages=turns,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.abc; cch=52f7d;"},
            {"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}},
        ],
        tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "medium"},
        metadata={"user_id": "u"},
        max_tokens=32000,
    )
    assert (answer["stop_reason"], answer["content"][0]["name"]) == ("tool_use", "get_weather")
    words = [result | {"content": "5\n(image was left out: the model reads text only)"}]
    plain = [*turns[:2], {"role": "assistant", "content": thinking[2:]}, {"role": "user", "content": words}]
    counted = post(server, path=f"{PATH}/count_tokens", messages=plain, system="You code.", tools=[WEATHER]).json()
    assert answer["usage"]["input_tokens"] == counted["input_tokens"]
    assert "left out of the prompt: web_search_20250305\n" in server.log


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
TEXT = {"type": "text", "text": "It rains.", "citations": None, "cache_control": {"type": "ephemeral"}}
ENTITLED = {"type": "document", "title": "Report", "context": "Of May.", "citations": {"enabled": True}}
READABLE = {
    "a text": (
        ENTITLED | {"source": {"type": "text", "media_type": "text/plain", "data": "It rains."}},
        "Report\nOf May.\nIt rains.",
    ),
    "a text without a title": ({"type": "document", "source": {"type": "text", "data": "It rains."}}, "It rains."),
    "content": (
        ENTITLED | {"context": None, "source": {"type": "content", "content": [TEXT, TEXT]}},
        "Report\nIt rains.\nIt rains.",
    ),
    "content that is a text": (ENTITLED | {"source": {"type": "content", "content": "Rain"}}, "Report\nOf May.\nRain"),
    "a search result": (
        {"type": "search_result", "title": "Weather", "source": "https://w.example/", "content": [TEXT]},
        "Weather\nhttps://w.example/\nIt rains.",
    ),
    "a reference to a tool": ({"type": "tool_reference", "tool_name": "get_weather"}, "get_weather"),
}


def prompt_of(repeater, messages, *, stream=False, **fields) -> str:
    """The text of the prompt, which the engine repeats."""
    fields |= {"messages": messages, "max_tokens": 300}
    (text,) = put_together(events(repeater, **fields)) if stream else blocks_of(created(repeater, **fields)["content"])
    return text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", READABLE)
def test_a_block_with_a_text_is_that_text(repeater, name, stream):
    block, text = READABLE[name]
    question = {"type": "text", "text": "And now?"}
    for messages, fields in [
        ([{"role": "user", "content": [block, question]}], {}),
        ([*HELLO, {"role": "assistant", "content": [block, question]}, *HELLO], {}),
        (HELLO, {"system": [block, question]}),
    ]:
        assert f"\n\n{text}\nAnd now?" in prompt_of(repeater, messages, stream=stream, **fields)


def after_a_call(content):
    """A conversation in which a tool gave this."""
    call = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    return [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("name", READABLE)
def test_a_tool_may_give_such_blocks(server, name):
    block, text = READABLE[name]
    counts = [
        post(server, path=f"{PATH}/count_tokens", messages=after_a_call(content)).json()
        for content in ([block, TEXT], f"{text}\nIt rains.")
    ]
    assert counts[0] == counts[1] and "input_tokens" in counts[0]


PDF = {"type": "base64", "media_type": "application/pdf", "data": "AA"}
UNREADABLE = {
    "a PDF": (ENTITLED | {"source": PDF}, "`document` from `base64`"),
    "a URL": (ENTITLED | {"source": {"type": "url", "url": "https://w.example/a.pdf"}}, "`document` from `url`"),
    "a file": (ENTITLED | {"source": {"type": "file", "file_id": "f"}}, "`document` from `file`"),
    "an image": (ENTITLED | {"source": {"type": "content", "content": [IMAGE, TEXT]}}, "`image` from `base64`"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_document_that_is_no_text_is_refused_or_left_out_of_a_result(repeater, name):
    block, said = UNREADABLE[name]
    refused = post(repeater, messages=[{"role": "user", "content": [block]}])
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    message = refused.json()["error"]["message"]
    assert message.startswith("messages.0.content.0") and said in message
    kind = said.split("`")[1]
    assert f"({kind} was left out: the model reads text only)" in prompt_of(repeater, after_a_call([block, TEXT]))


INCOMPLETE = {
    "source": ENTITLED,
    "source.data": ENTITLED | {"source": {"type": "text"}},
    "source.content": ENTITLED | {"source": {"type": "content"}},
    "source.content.0.text": ENTITLED | {"source": {"type": "content", "content": [{"type": "text"}]}},
    "content": {"type": "search_result", "title": "Weather", "source": "w"},
    "tool_name": {"type": "tool_reference"},
}


@pytest.mark.parametrize("field", INCOMPLETE)
def test_a_block_without_its_text_is_refused(server, field):
    for messages, where in [
        ([{"role": "user", "content": [INCOMPLETE[field]]}], "messages.0.content.0"),
        (after_a_call([INCOMPLETE[field]]), "messages.2.content.0.content.0"),
    ]:
        refused = post(server, messages=messages)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(f"{where}.{field}: is missing")


REFUSED = [
    {"max_tokens": None},
    {"max_tokens": 0},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    {"messages": [{"role": "wizard", "content": "a"}]},
    {"tools": [{"description": "without a name"}]},
    {"tools": [{"name": "a b"}]},
    {"tool_choice": {"type": "sometimes"}},
    {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}},
    {"output_config": {"format": {"type": "json_schema"}}},
    {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
]


@pytest.mark.parametrize("fields", REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_form(server, fields, stream):
    response = post(server, stream=stream, **fields)
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"]


def test_a_call_that_must_be_made(server):
    for tool_choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
        whole = created(server, "call", tools=[WEATHER], tool_choice=tool_choice)
        assert (blocks_of(whole["content"]), whole["stop_reason"]) == ([W], "tool_use")


def test_another_model_is_not_found(server):
    response = post(server, model="other")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


def test_another_method_is_refused_in_anthropics_form(server):
    with server.http() as http:
        response = http.get(PATH)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["type"] == "api_error"


def test_the_key_may_be_in_anthropics_field(tmp_path):
    with running_server(tmp_path, ECHO, EchoConfig(reply=(65,)), api_keys=("secret",)) as server, server.http() as http:
        body = {"messages": HELLO, "max_tokens": 5}
        statuses = [http.post(PATH, json=body, headers={"x-api-key": key}).status_code for key in ("secret", "other")]
        assert statuses == [200, 401]
        refused = http.post(PATH, json=body).json()
        assert (refused["type"], refused["error"]["type"]) == ("error", "authentication_error")
        assert http.post(PATH, json=body, headers={"Authorization": "Bearer secret"}).status_code == 200
