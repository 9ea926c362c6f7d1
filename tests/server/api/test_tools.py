"""Tools in /v1/chat/completions: a scripted model calls them, real clients read the calls."""

from __future__ import annotations

import itertools
import json

import openai
import pydantic
import pytest

from server.text.tool_calls.json_calls import CALL_TAG
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT
from tests.server.support.running import ECHO, running_server, server_of
from tests.server.support.sse_events import stream_events
from tests.server.support.tokenizers import PYTHON_TAG, TOOL_TEMPLATE

ARGUMENTS = '{"city": "Århus 🙂", "days": 2}'
CALL = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
TIME = '{"name": "get_time", "parameters": {}}'
SCRIPTS = {
    "call": CALL,
    "tagged": CALL,  # after a python tag
    "text first": f"Let me look.\n{CALL}",
    "two calls": f"{CALL}; {TIME}",
    "no call": 'I know {"name": "nothing", "parameters": {}} of it.',
    "plain": "Fine weather.",
}
SEEDS = {name: seed for seed, name in enumerate(SCRIPTS)}
REPLIES = tuple(((PYTHON_TAG,) if name == "tagged" else ()) + tuple(text.encode()) for name, text in SCRIPTS.items())
MESSAGES = [{"role": "user", "content": "How is the weather?"}]


class Weather(pydantic.BaseModel):
    """The weather of some days."""

    city: str
    days: int


def function(name: str = "get_weather", **fields):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [function(), function("get_time")]


server = server_of(EchoConfig(reply=(), replies=REPLIES), template=TOOL_TEMPLATE)


# The pythonic format, and all tokens in one step.
fast_pythonic = server_of(
    EchoConfig(reply=tuple(b"Hm. [get_weather(city='a', days=-1), get_time()]"), tokens_per_step=1000),
    template=TOOL_TEMPLATE,
    tool_call_parser="pythonic",
)


HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
HERMES_TIME = '<tool_call>\n{"arguments": {}, "name": "get_time"}\n</tool_call>'
HERMES_SCRIPTS = {
    "one": (HERMES_CALL, None, [("get_weather", ARGUMENTS)]),
    "two": (f"{HERMES_CALL}\n{HERMES_TIME}\n", None, [("get_weather", ARGUMENTS), ("get_time", "{}")]),
    "text first": (f"Let me look.\n{HERMES_TIME}", "Let me look.\n", [("get_time", "{}")]),
    "Groq's": (HERMES_CALL.replace("{", '{"id": "call_deok", ', 1), None, [("get_weather", ARGUMENTS)]),
}
XLAM_CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
XLAM_TIME = '{"name": "get_time", "arguments": {}}'
XLAM_SCRIPTS = {
    "one": (f"[{XLAM_CALL}]", None, [("get_weather", ARGUMENTS)]),
    "two": (f"[{XLAM_TIME}, {XLAM_CALL}]", None, [("get_time", "{}"), ("get_weather", ARGUMENTS)]),
    "after thinking": (f"<think>Hm.</think>[{XLAM_TIME}]", "<think>Hm.</think>", [("get_time", "{}")]),
    "in a fence": (f"```json\n[{XLAM_TIME}]\n```", None, [("get_time", "{}")]),
}
SHOWN = {
    "hermes": ("{# Calls are in <tool_call></tool_call>. #}", HERMES_SCRIPTS),
    "xlam": ('{# [{"name": "tool_call_name", "arguments": {}}] #}', XLAM_SCRIPTS),
}


@pytest.fixture(scope="module", params=SHOWN)
def shown(request, tmp_path_factory):
    """A server whose template shows a format, and the texts of its model."""
    note, scripts = SHOWN[request.param]
    config = EchoConfig(reply=(), replies=tuple(tuple(script.encode()) for script, _, _ in scripts.values()))
    with running_server(tmp_path_factory.mktemp("shown"), ECHO, config, template=TOOL_TEMPLATE + note) as running:
        yield running, list(scripts.values())


WITHOUT_AUTO = {"template": TOOL_TEMPLATE, "enable_auto_tool_choice": False, "tool_call_parser": "pythonic"}
without_auto = server_of(EchoConfig(reply=(), replies=REPLIES), **WITHOUT_AUTO)


def body(script: str, **fields):
    return {"messages": MESSAGES, "tools": TOOLS, "seed": SEEDS[script], **fields}


def post(server, fields):
    return server.post(CHAT, fields)


def choice(server, fields):
    response = post(server, fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(server, fields, index: int = 0):
    """(content, calls, finish reason) of a stream, put together as clients do."""
    chunks = server.events(CHAT, fields)
    content, calls, finish = "", [], None
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["index"] != index:
                continue
            content += part["delta"].get("content") or ""
            finish = part["finish_reason"] or finish
            for delta in part["delta"].get("tool_calls", ()):
                if "id" in delta:
                    assert delta["index"] == len(calls)
                    assert len(delta["id"]) >= 9
                    assert delta["type"] == "function"
                    calls.append([delta["function"]["name"], ""])
                else:
                    assert "name" not in delta["function"]
                calls[delta["index"]][1] += delta["function"]["arguments"]
    return content, [tuple(call) for call in calls], finish


def calls_of(message):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


W, T = ("get_weather", ARGUMENTS), ("get_time", "{}")
EXPECTED = {
    "call": (None, [W], "tool_calls"),
    "tagged": (None, [W], "tool_calls"),
    "text first": ("Let me look.\n", [W], "tool_calls"),
    "two calls": (None, [W, T], "tool_calls"),
    "no call": (SCRIPTS["no call"], [], "stop"),
    "plain": (SCRIPTS["plain"], [], "stop"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_calls_are_the_same_streamed_and_whole(server, script):
    content, calls, finish = EXPECTED[script]
    whole = choice(server, body(script))
    assert (whole["message"]["content"], calls_of(whole["message"]), whole["finish_reason"]) == (content, calls, finish)
    assert streamed(server, body(script)) == (content or "", calls, finish)


def test_a_call_that_comes_in_one_step_is_not_lost(fast_pythonic):
    fields = {"messages": MESSAGES, "tools": TOOLS}
    expected = [("get_weather", '{"city": "a", "days": -1}'), T]
    assert streamed(fast_pythonic, fields) == ("Hm. ", expected, "tool_calls")
    assert calls_of(choice(fast_pythonic, fields)["message"]) == expected


def test_a_format_that_no_grammar_constrains_says_so_of_strict_tools(fast_pythonic):
    fields = {"messages": MESSAGES, "tools": [function("get_time"), function(strict=True)]}
    response = post(fast_pythonic, fields)
    assert (response.status_code, response.headers["x-unenforced-keywords"]) == (200, "get_weather: strict")
    plain = post(fast_pythonic, {"messages": MESSAGES, "tools": [function("get_time"), function()]})
    assert calls_of(response.json()["choices"][0]["message"]) == calls_of(plain.json()["choices"][0]["message"]) != []
    assert "x-unenforced-keywords" not in plain.headers


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_calls_in_the_format_that_the_template_shows(shown, number, tool_choice):
    server, scripts = shown
    _, content, calls = scripts[number]
    fields = {"messages": MESSAGES, "tools": TOOLS, "seed": number, "tool_choice": tool_choice}
    whole = choice(server, fields)
    assert (whole["message"]["content"], calls_of(whole["message"])) == (content, calls)
    assert whole["finish_reason"] == "tool_calls"
    assert streamed(server, fields) == (content or "", calls, "tool_calls")


def test_the_flag_wins_over_the_template(tmp_path):
    config = EchoConfig(reply=tuple(HERMES_CALL.encode()))
    with running_server(tmp_path, ECHO, config, template=TOOL_TEMPLATE + CALL_TAG, tool_call_parser="pythonic") as it:
        assert choice(it, {"messages": MESSAGES, "tools": TOOLS})["message"]["content"] == HERMES_CALL


def test_each_choice_has_its_own_calls(server):
    fields = body("call", n=3)  # the seeds of the next scripts, too
    message = [it["message"] for it in post(server, fields).json()["choices"]]
    assert [calls_of(it) for it in message] == [[W], [W], [W]]
    ids = [call["id"] for it in message for call in it["tool_calls"]]
    assert len(set(ids)) == 3
    assert streamed(server, fields, index=2) == ("Let me look.\n", [W], "tool_calls")


def test_one_call_where_calls_are_not_parallel(server):
    fields = body("two calls", parallel_tool_calls=False)
    whole = choice(server, fields)
    assert (calls_of(whole["message"]), whole["finish_reason"]) == ([W], "tool_calls")
    assert streamed(server, fields) == ("", [W], "tool_calls")


def test_scores_come_with_calls(server):
    whole = choice(server, body("call", logprobs=True))
    assert len(whole["logprobs"]["content"]) == len(CALL.encode()) + 1
    chunks = server.events(CHAT, body("call", logprobs=True))
    parts = [part["logprobs"]["content"] for c in chunks for part in c["choices"] if part["logprobs"]]
    assert [entry for part in parts for entry in part] == whole["logprobs"]["content"]


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(("choice_of_tool", "finish"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_call_that_must_be_made(server, choice_of_tool, finish):
    fields = body("call", tool_choice=choice_of_tool)
    whole = choice(server, fields)
    assert (calls_of(whole["message"]), whole["finish_reason"]) == ([W], finish)
    assert streamed(server, fields) == ("", [W], finish)


@pytest.mark.parametrize("choice_of_tool", ["auto", "required", NAMED], ids=str)
@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.4, 0.6, 0.9])
def test_a_call_that_the_limit_cuts_stays_in_part_if_it_must_be_made(server, choice_of_tool, fraction):
    """vLLM's answers to named and required tools have what was written of a call; an answer that may be a text has
    neither a call nor content."""
    fields = body("call", tool_choice=choice_of_tool, max_tokens=int(fraction * len(CALL.encode())))
    whole = choice(server, fields)
    calls = calls_of(whole["message"])
    has_name = choice_of_tool == NAMED or (choice_of_tool == "required" and fraction > 0.3)
    assert [name for name, _ in calls] == ["get_weather"] * has_name
    assert (whole["message"]["content"], whole["finish_reason"]) == (None if calls else "", "length")
    assert all(ARGUMENTS.startswith(part.rstrip("\N{REPLACEMENT CHARACTER}")) for _, part in calls)
    assert fraction < 0.6 or not calls or len(calls[0][1]) > 4
    content, streamed_calls, finish = streamed(server, fields)
    assert (content, finish) == ("", "length")
    assert all(name == "get_weather" and ARGUMENTS.startswith(arguments) for name, arguments in streamed_calls)
    assert choice_of_tool == "auto" or streamed_calls == calls
    second = choice(server, fields | {"seed": SEEDS["two calls"], "max_tokens": len(CALL.encode()) + 20})
    begun = [("get_time", "")] if choice_of_tool == "required" else []
    assert calls_of(second["message"])[:1] == [W]
    assert [call[0] for call in calls_of(second["message"])[1:]] in ([], [name for name, _ in begun])
    assert second["finish_reason"] == ("stop" if choice_of_tool == NAMED else "length")


def test_the_cut_call_of_a_named_tool_is_read_by_the_official_client(server):
    fields = body("call", tool_choice=NAMED, max_tokens=3)
    answer = server.client().chat.completions.create(model="test-model", **fields)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments, answer.choices[0].finish_reason) == (
        "get_weather",
        "",
        "length",
    )


@pytest.mark.parametrize("choice_of_tool", ["auto", "required", NAMED], ids=str)
def test_a_call_that_a_stop_string_cuts_is_no_call(server, choice_of_tool):
    fields = body("call", tool_choice=choice_of_tool, stop="rhus")
    whole = choice(server, fields)
    assert (whole["message"]["content"], calls_of(whole["message"]), whole["finish_reason"]) == ("", [], "stop")
    content, calls, finish = streamed(server, fields)
    assert (content, finish) == ("", "stop")
    assert all(ARGUMENTS.startswith(arguments) for _, arguments in calls)


def test_a_call_that_must_be_made_is_read_whatever_the_models_format(without_auto):
    fields = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": 0}
    assert calls_of(choice(without_auto, fields)["message"]) == [W]


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_tools_that_are_allowed_are_called(server):
    for mode in ("auto", "required"):
        assert calls_of(choice(server, body("call", tool_choice=allowed(mode, "get_weather")))["message"]) == [W]
    message = choice(server, body("call", tool_choice=allowed("auto", "get_time")))["message"]
    assert (message["content"], message.get("tool_calls")) == (CALL, None)


def test_no_call_is_looked_for_where_none_is_wanted(server):
    for fields in ({"tool_choice": "none"}, {"tools": []}, {"tools": None}):
        assert choice(server, body("call", **fields))["message"]["content"] == CALL


def test_the_prompt_has_the_tools_unless_none_is_wanted(server):
    def num_prompt_tokens(**fields):
        return post(server, body("plain", **fields)).json()["usage"]["prompt_tokens"]

    assert num_prompt_tokens() > num_prompt_tokens(tools=TOOLS[:1]) > num_prompt_tokens(tool_choice="none")
    counted = server.post("/tokenize", {"messages": MESSAGES, "tools": TOOLS}).json()["count"]
    assert counted == num_prompt_tokens()


def test_the_official_client_streams_and_parses(server):
    client = server.client()
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    options = {"model": "test-model", "messages": MESSAGES, "tools": [tool], "seed": SEEDS["text first"]}
    parsed = client.chat.completions.parse(**options).choices[0].message
    assert parsed.content == "Let me look.\n"
    assert parsed.tool_calls[0].function.parsed_arguments == Weather(city="Århus 🙂", days=2)
    with client.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert final.message.tool_calls[0].function.parsed_arguments == Weather(city="Århus 🙂", days=2)
    assert final.finish_reason == "tool_calls"


def test_a_conversation_goes_on_after_a_call(server):
    client = server.client()
    options = {"model": "test-model", "tools": TOOLS}
    said = client.chat.completions.create(messages=MESSAGES, seed=SEEDS["two calls"], **options).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in said.tool_calls]
    answer = client.chat.completions.create(messages=[*MESSAGES, said, *results], seed=SEEDS["plain"], **options)
    assert answer.choices[0].message.content == SCRIPTS["plain"]


HISTORY = [
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1'}}]},
    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": {"b": [1]}}}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":' * 90 + "1" + "}" * 90}}]},
    {"role": "assistant", "function_call": {"name": "f", "arguments": "[1]"}},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"role": "assistant", "content": None, "refusal": "no"},
    {"role": "assistant", "content": "", "tool_calls": []},
    {"role": "tool", "content": [{"type": "text", "text": "5"}], "tool_call_id": "1"},
    {"role": "tool", "content": None},
    {"role": "function", "name": "f", "content": "5"},
    {"role": "ipython", "content": "5"},
]


@pytest.mark.parametrize("message", HISTORY, ids=range(len(HISTORY)))
def test_every_history_is_rendered(server, message):
    messages = [*MESSAGES, message, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert choice(server, body("plain", messages=messages))["message"]["content"] == SCRIPTS["plain"]


def test_an_image_in_a_tools_result_is_left_out_in_words(server):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    result = {"role": "tool", "content": [{"type": "text", "text": "5"}, image], "tool_call_id": "1"}
    in_words = result | {"content": "5\n(image_url was left out: the model reads text only)"}
    with server.http() as http:
        both = [http.post("/tokenize", json={"messages": [*MESSAGES, one]}).json() for one in (result, in_words)]
    assert both[0] == both[1] and both[0]["count"] > len("was left out")
    named = [function("github/issues:read.v-1")]  # names that other servers allow
    answer = choice(server, body("plain", messages=[*MESSAGES, result], tools=named))
    assert answer["message"]["content"] == SCRIPTS["plain"]


def test_documents_are_shown(server):
    with server.http() as http:
        documents = [{"title": "A", "text": "what it says"}]
        ids = http.post("/tokenize", json={"messages": MESSAGES, "documents": documents}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert "A: what it says\n" in text
    assert choice(server, body("plain", documents=documents))["message"]["content"] == SCRIPTS["plain"]


DEEP = {"type": "object", "properties": json.loads('{"a":' * 40 + "1" + "}" * 40)}
REFUSED = [
    ({"tool_choice": "auto", "tools": None}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [function("a b")]}, "tools.0.function.name"),
    ({"tools": [function("")]}, "tools.0.function.name"),
    ({"tools": [function(), function()]}, "tools.1.function.name"),
    ({"tools": [function(parameters=[])]}, "tools"),
    ({"tools": [function(parameters={"type": "string"})]}, "tools.0.function.parameters.type"),
    ({"tools": [function(parameters=DEEP)]}, "tools.0.function.parameters"),
    ({"tools": [function(description="a" * 2**18)]}, "tools"),
    ({"tools": [function(f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [function(parameters={"properties": {"a": {"type": "strin"}}}, strict=True)]}, "tools"),
    ({"tools": [function(parameters={"properties": {"x": {"type": "y"}}})], "tool_choice": "required"}, "tools"),
    ({"tool_choice": allowed("auto", "get_time", "other")}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": []}}}, "tool_choice"),
    ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"documents": "a"}, "documents"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]},
     "messages.0.tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_meant_is_refused_by_name(server, fields, param):
    response = post(server, body("plain", **fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_server_without_auto_choice_says_so(without_auto):
    error = post(without_auto, {"messages": MESSAGES, "tools": TOOLS}).json()["error"]
    assert (error["param"], "--no-enable-auto-tool-choice" in error["message"]) == ("tool_choice", True)


def test_a_template_without_tools_says_so(scripted):
    for fields in ({"tools": TOOLS}, {"documents": [{"text": "a"}]}):
        error = post(scripted, {"messages": MESSAGES, **fields}).json()["error"]
        assert "chat template" in error["message"]
        assert error["param"] in fields


@pytest.mark.parametrize("which", ["server", "fast_pythonic"])
def test_usage_grows_with_each_chunk_of_a_call(request, which):
    running = request.getfixturevalue(which)
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    fields = {"messages": MESSAGES, "tools": TOOLS, "stream": True, "seed": SEEDS["two calls"], "max_tokens": 200}
    with running.http() as http:
        *chunks, last = stream_events(http, CHAT, fields | options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert all(before < after for before, after in itertools.pairwise(counts))
    assert (counts[0], counts[-1]) == (0, last["usage"]["completion_tokens"])
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ()):
            call = calls.setdefault(delta["index"], {"name": "", "arguments": ""})
            call["name"] += delta["function"].get("name", "")
            call["arguments"] += delta["function"]["arguments"]
    assert [call["name"] for call in calls.values()] == ["get_weather", "get_time"]
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls.values())
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
