"""/v1/responses through real sockets, with the official client and without it."""

from __future__ import annotations

import json

import openai
import pytest
from openai.types.responses import Response

from server.text.tokenizer import ByteLevelTokenizer
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import wait_until
from tests.server.support.running import ECHO, running_server, server_of
from tests.server.support.sse_events import parse_named_events
from tests.server.support.tokenizers import TOOL_TEMPLATE, byte_tokenizer

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
TOKENIZER = ByteLevelTokenizer(byte_tokenizer(), config={}, chat_template=None)
ARGUMENTS = '{"city": "Århus"}'
CALL = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
SCRIPTS = {
    "plain": "Fine, thänks 🙂.",
    "call": CALL,
    "both": f"Let me see. {CALL}; {CALL} Done.",
    "nothing": "",
}
SEEDS = {name: seed for seed, name in enumerate(SCRIPTS)}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TEXT_EVENTS = ["output_item.added", "content_part.added", "output_text.delta"]
TEXT_EVENTS += ["output_text.done", "content_part.done", "output_item.done"]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


server = server_of(
    EchoConfig(reply=(), replies=tuple(tuple(text.encode()) for text in SCRIPTS.values())), template=TOOL_TEMPLATE
)


def post(server, script: str = "plain", **fields):
    return server.post(PATH, {"input": "hello", "seed": SEEDS[script], **fields})


def created(server, script: str = "plain", **fields):
    response = post(server, script, **fields)
    assert response.status_code == 200, response.text
    Response.model_validate(response.json(), strict=True)
    return response.json()


def events(server, script: str = "plain", **fields):
    """The events of a stream, checked for their numbers."""
    response = post(server, script, stream=True, **fields)
    assert response.status_code == 200, response.text
    found = parse_named_events(response.text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def kinds(found):
    """Their types, equal neighbours once."""
    names = [event["type"].removeprefix("response.") for event in found]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def shape(output):
    """An output's items without their ids."""
    return [
        item["content"][0]["text"] if item["type"] == "message" else (item["name"], item["arguments"])
        for item in output
    ]  # fmt: skip


W = ("get_weather", ARGUMENTS)
OUTPUTS = {
    "plain": [SCRIPTS["plain"]],
    "call": [W],
    "both": ["Let me see. ", W, W, " Done."],
    "nothing": [""],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_response_is_the_same_streamed_and_whole(server, script):
    whole = created(server, script, tools=[WEATHER])
    assert shape(whole["output"]) == OUTPUTS[script]
    assert (whole["status"], whole["object"], whole["error"]) == ("completed", "response", None)
    found = events(server, script, tools=[WEATHER])
    final = found[-1]["response"]
    assert shape(final["output"]) == OUTPUTS[script]
    assert found[-1]["type"] == "response.completed"
    assert final["usage"] == whole["usage"]
    assert final["usage"]["output_tokens"] == len(SCRIPTS[script].encode()) + 1


def test_events_come_in_order(server):
    start, end = ["created", "in_progress"], ["completed"]
    assert kinds(events(server)) == [*start, *TEXT_EVENTS, *end]
    assert kinds(events(server, "call", tools=[WEATHER])) == [*start, *CALL_EVENTS, *end]
    both = kinds(events(server, "both", tools=[WEATHER]))
    assert both == [*start, *TEXT_EVENTS, *CALL_EVENTS, *CALL_EVENTS, *TEXT_EVENTS, *end]
    assert kinds(events(server, "nothing")) == [*start, *[it for it in TEXT_EVENTS if "delta" not in it], *end]


def test_deltas_make_up_the_items_that_are_done(server):
    found = events(server, "both", tools=[WEATHER])
    for index, item in enumerate(found[-1]["response"]["output"]):
        own = [event for event in found if event.get("output_index") == index]
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert own[-1]["item"] == item


def test_the_official_client(server):
    client = server.client()
    options = {"model": "test-model", "input": "hello", "extra_body": {"seed": SEEDS["plain"]}}
    assert client.responses.create(**options).output_text == SCRIPTS["plain"]
    with client.responses.stream(**options) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == deltas == SCRIPTS["plain"]
    response = client.responses.create(**options, metadata={"a": "b"}, instructions="Be kind.")
    assert client.responses.retrieve(response.id) == response
    assert (response.metadata, response.instructions) == ({"a": "b"}, "Be kind.")
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_the_official_client_goes_on_after_a_call(server):
    client = server.client()
    options = {"model": "test-model", "tools": [WEATHER | {"strict": False}]}
    first = client.responses.create(input="weather?", extra_body={"seed": SEEDS["call"]}, **options)
    (call,) = first.output
    assert json.loads(call.arguments) == {"city": "Århus"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    plain = {"seed": SEEDS["plain"]}
    second = client.responses.create(previous_response_id=first.id, input=[result], extra_body=plain, **options)
    assert second.output_text == SCRIPTS["plain"]
    again = [{"role": "user", "content": "weather?"}, *first.output, result]
    apart = client.responses.create(input=again, extra_body=plain, **options)
    assert apart.usage.input_tokens == second.usage.input_tokens > first.usage.input_tokens


PATCH = {"type": "custom", "name": "get_weather", "description": "A text.", "format": {"type": "text"}}


def test_a_custom_tool_is_called_with_a_text(server):
    """The model of the script writes no `input`, so all that it writes is the text."""
    whole = created(server, "call", tools=[PATCH])
    (item,) = whole["output"]
    assert (item["type"], item["name"], item["input"], item["id"][:4]) == (
        "custom_tool_call", "get_weather", ARGUMENTS, "ctc_",
    )  # fmt: skip
    found = events(server, "call", tools=[PATCH])
    own = [event["type"].removeprefix("response.") for event in found[2:-1]]
    assert own == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
    ]  # fmt: skip
    assert found[-2]["item"]["input"] == found[3]["delta"] == ARGUMENTS


def test_a_custom_tool_is_a_function_with_one_text(server):
    """The history of its calls is that of such a function's calls."""
    patterned = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}}
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", "pattern": "^(?:[a-z]+)$"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    function = {"type": "function", "name": "get_weather", "description": "A text.", "parameters": schema}
    call = {"call_id": "a", "name": "get_weather"}
    custom = [
        {"role": "user", "content": "x"},
        {"type": "custom_tool_call", **call, "input": "abc"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
    ]
    plain = [
        {"role": "user", "content": "x"},
        {"type": "function_call", **call, "arguments": '{"input":"abc"}'},
        {"type": "function_call_output", "call_id": "a", "output": "done"},
    ]
    counts = [
        created(server, input=history, tools=[tool])["usage"]["input_tokens"]
        for history, tool in ((custom, patterned), (plain, function))
    ]
    assert counts[0] == counts[1]


LOOKUP = {"type": "function", "name": "lookup", "description": "A customer.", "parameters": WEATHER["parameters"]}
CRM = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [LOOKUP, WEATHER]}
FLAT = [
    LOOKUP | {"name": "crm__lookup", "description": "Customers.\nA customer."},
    WEATHER | {"name": "crm__get_weather"},
]
crm_caller = server_of(
    EchoConfig(reply=tuple(f'{{"name": "crm__lookup", "parameters": {ARGUMENTS}}}'.encode())), template=TOOL_TEMPLATE
)


def test_a_call_names_the_namespace_apart(crm_caller):
    whole = created(crm_caller, tools=[CRM, LOOKUP])
    (item,) = whole["output"]
    assert (item["type"], item["namespace"], item["name"], item["arguments"]) == (
        "function_call", "crm", "lookup", ARGUMENTS,
    )  # fmt: skip
    shown, plain = whole["tools"]
    assert (shown["type"], shown["name"], [tool["name"] for tool in shown["tools"]]) == (
        "namespace", "crm", ["lookup", "get_weather"],
    )  # fmt: skip
    assert (plain["name"], "tools" in plain) == ("lookup", False)
    found = events(crm_caller, tools=[CRM, LOOKUP])
    assert kinds(found) == ["created", "in_progress", *CALL_EVENTS, "completed"]
    items = [event["item"] for event in found if "item" in event] + found[-1]["response"]["output"]
    assert [(item["namespace"], item["name"]) for item in items] == [("crm", "lookup")] * 3
    assert [event["name"] for event in found if event["type"].endswith("arguments.done")] == ["lookup"]


def test_a_custom_tool_of_a_namespace_is_called_with_a_text(crm_caller):
    tools = [CRM | {"tools": [PATCH | {"name": "lookup"}]}]
    streamed = events(crm_caller, tools=tools)[-1]["response"]
    for response in (created(crm_caller, tools=tools), streamed):
        (item,) = response["output"]
        assert (item["type"], item["namespace"], item["name"], item["input"]) == (
            "custom_tool_call", "crm", "lookup", ARGUMENTS,
        )  # fmt: skip


def test_the_model_sees_the_namespace_in_the_names(server):
    """In the tools, in the history, and with the description of the namespace before that of its first tool."""
    result = {"type": "function_call_output", "call_id": "a", "output": "Århus"}
    call = {"type": "function_call", "call_id": "a", "arguments": "{}"}
    spaced, flat = (
        created(server, input=[{"role": "user", "content": "x"}, call | names, result], tools=tools)
        for tools, names in [([CRM], {"name": "lookup", "namespace": "crm"}), (FLAT, {"name": "crm__lookup"})]
    )
    assert spaced["usage"] == flat["usage"]
    with server.http() as http:
        items = [http.get(f"{PATH}/{response['id']}/input_items").json()["data"][1] for response in (spaced, flat)]
    assert [(item["name"], item.get("namespace")) for item in items] == [("lookup", "crm"), ("crm__lookup", None)]


def test_a_conversation_goes_on_after_a_call_of_a_namespace(crm_caller):
    first = created(crm_caller, input="who?", tools=[CRM])
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "Århus"}
    again = [{"role": "user", "content": "who?"}, *first["output"], result]
    counts = [
        created(crm_caller, tools=[CRM], **fields)["usage"]["input_tokens"]
        for fields in ({"previous_response_id": first["id"], "input": [result]}, {"input": again})
    ]
    assert counts[0] == counts[1] > first["usage"]["input_tokens"]


def test_a_choice_names_the_namespace_apart(crm_caller):
    chosen = {"type": "function", "name": "lookup", "namespace": "crm"}
    for choice in (chosen, {"type": "allowed_tools", "mode": "required", "tools": [chosen]}):
        (item,) = created(crm_caller, tools=[WEATHER, CRM], tool_choice=choice)["output"]
        assert (item["namespace"], item["name"]) == ("crm", "lookup")
    refused = post(crm_caller, tools=[CRM], tool_choice={"type": "function", "name": "lookup"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(("length", "status"), [(128, 200), (129, 400)])
def test_a_name_with_its_namespace_has_at_most_128_characters(server, length, status):
    tool = LOOKUP | {"name": "n" * (length - len("crm__")), "tools": None}
    assert post(server, tools=[CRM | {"tools": [tool]}]).status_code == status


def test_what_is_no_tool_of_a_namespace_is_left_out_or_refused(crm_caller, tmp_path):
    inner = CRM | {"tools": [*CRM["tools"], {"type": "shell"}, CRM]}
    assert created(crm_caller, tools=[inner])["usage"] == created(crm_caller, tools=FLAT)["usage"]
    assert "left out of the prompt: namespace, shell\n" in crm_caller.log
    with running_server(tmp_path, ECHO, EchoConfig(reply=(65,)), template=TOOL_TEMPLATE, strict_fields=True) as strict:
        assert post(strict, tools=[inner]).json()["error"]["param"] == "tools.0.tools.2.type"
        assert created(strict, tools=[CRM])["status"] == "completed"
    unnamed = post(crm_caller, tools=[CRM | {"tools": [LOOKUP, {"type": "function"}]}])
    assert unnamed.json()["error"]["message"].startswith("tools.0.tools.1.name: is missing")
    twice = post(crm_caller, tools=[CRM, FLAT[0]])
    assert twice.status_code == 400 and "'crm__lookup' is the name of another tool" in twice.json()["error"]["message"]


def test_what_a_coding_agent_sends_besides_functions_is_left_out(server):
    """The fields of Codex, with items and tools that only OpenAI's models know."""
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "abc"}
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    image = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    history = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You code."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": image},
    ]
    tools = [
        WEATHER | {"strict": False},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search"},
        {"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1"},
    ]
    agent = {
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "high", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"session_id": "s"},
        "text": {"verbosity": "low"},
        "truncation": "auto",
    }
    plain = created(server, input=history, tools=[WEATHER])
    whole = created(server, input=[history[0], reasoning, search, *history[1:]], tools=tools, **agent)
    assert whole["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert [tool["type"] for tool in whole["tools"]] == ["function"]
    assert "input_image was left out" in history_text(server, history)
    assert "left out of the prompt: image_generation, local_shell, mcp, tool_search, web_search\n" in server.log


def history_text(server, history) -> str:
    """What the template shows of it: the stored input of a response."""
    response = created(server, input=history, tools=[WEATHER])
    with server.http() as http:
        return http.get(f"{PATH}/{response['id']}/input_items").text


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}, {}], ids=str)
def test_a_choice_without_tools_is_a_text(server, fields):
    assert created(server, tool_choice="auto", parallel_tool_calls=True, **fields)["status"] == "completed"


def test_a_prompt_that_is_too_long_is_cut_at_its_beginning_if_asked(server):
    long = [{"role": "user", "content": "a" * 200}] * 40
    assert post(server, input=long).status_code == 400
    cut = created(server, input=long, truncation="auto", max_output_tokens=50)
    assert (cut["truncation"], cut["status"]) == ("auto", "completed")


def test_the_form_of_the_text_and_the_choice_of_a_tool_are_repeated(server):
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}}
    named = {"type": "function", "name": "get_weather"}
    response = created(server, "call", tools=[WEATHER], tool_choice=named, text=text)
    assert (response["text"], response["tool_choice"]) == (text, named)
    assert shape(response["output"]) == [W]


def test_a_conversation_goes_on_without_its_instructions(server):
    first = created(server, instructions="A very long instruction.")
    second = created(server, previous_response_id=first["id"], input=[{"role": "user", "content": "and?"}])
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        first["output"][0],
        {"type": "message", "role": "user", "content": "and?"},
    ]
    assert created(server, input=turns)["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert second["previous_response_id"] == first["id"]


def test_a_limit_makes_a_response_incomplete(server):
    whole = created(server, max_output_tokens=3)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    found = events(server, max_output_tokens=3)
    assert found[-1]["type"] == "response.incomplete"
    assert shape(found[-1]["response"]["output"]) == [SCRIPTS["plain"][:3]]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("cut", [{"max_output_tokens": CALL.index("rhus")}, {"stop": "rhus"}])
def test_a_call_that_is_cut_is_no_output(server, choice, cut):
    fields = {"tools": [WEATHER], "tool_choice": choice, **cut}
    (item,) = created(server, "call", **fields)["output"]
    if choice == "required" and "max_output_tokens" in cut:
        assert (item["type"], item["name"], item["status"]) == ("function_call", "get_weather", "incomplete")
        assert len(item["arguments"]) > 5 and ARGUMENTS.startswith(
            item["arguments"].rstrip("\N{REPLACEMENT CHARACTER}")
        )
    else:
        assert shape([item]) == [""]
    final = events(server, "call", **fields)[-1]["response"]
    status = "incomplete" if "max_output_tokens" in cut else "completed"
    assert final["status"] == status
    for item in final["output"]:  # what had been sent when the call was cut, perhaps within a character
        sent = item.get("arguments", "").rstrip("\N{REPLACEMENT CHARACTER}")
        assert item["type"] == "message" or (item["status"] == "incomplete" and ARGUMENTS.startswith(sent))
    following = post(server, "plain", previous_response_id=final["id"], tools=[WEATHER])
    with server.http() as http:
        messages = [{"role": "user", "content": "hello"}] * 2
        answer = [{"role": "assistant", "content": ""}] if final["output"][0]["type"] == "message" else []
        messages[1:1] = answer
        tools = [{"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}]
        counted = http.post("/tokenize", json={"messages": messages, "tools": tools}).json()["count"]
    assert following.json()["usage"]["input_tokens"] == counted


def test_what_is_not_stored_is_not_found(server):
    response = created(server, store=False)
    with server.http() as http:
        assert http.get(f"{PATH}/{response['id']}").status_code == 404
        assert http.delete(f"{PATH}/{response['id']}").status_code == 404
        assert http.post(f"{PATH}/{response['id']}/cancel").status_code == 404
    error = post(server, previous_response_id=response["id"]).json()["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_a_stored_response_is_not_sent_as_events_again(server):
    client = server.client()
    id = created(server, include=[LOGPROBS])["id"]
    assert client.responses.retrieve(id, include=[LOGPROBS]).output[0].content[0].logprobs
    for options, param in (
        ({"stream": True}, "stream"),
        ({"starting_after": 3}, "starting_after"),
        ({"stream": True, "starting_after": -1}, "starting_after"),
        ({"extra_query": {"stream": "maybe"}}, "stream"),
        ({"include": ["file_search_call.results"]}, "include"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.retrieve(id, **options)
        assert refused.value.param == param


def test_the_tokens_of_an_input_are_counted_as_the_prompt_is(server):
    client = server.client()
    first = created(server, tools=[WEATHER])
    same = {"previous_response_id": first["id"], "input": "and?", "instructions": "Be kind.", "tools": [WEATHER]}
    counted = client.responses.input_tokens.count(model="test-model", **same)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == created(server, **same)["usage"]["input_tokens"]
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(model="other", input="a")
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.responses.input_tokens.count(input="a", tool_choice={"type": "function", "name": "f"})


@pytest.mark.parametrize(("status", "continues"), [("incomplete", True), ("in_progress", True), ("completed", False)])
def test_a_last_message_that_is_not_complete_is_continued(server, status, continues):
    content = [{"type": "output_text", "text": "Once upon", "annotations": []}]
    last = {"type": "message", "role": "assistant", "id": "msg_1", "status": status, "content": content}
    answer = created(server, input=[{"role": "user", "content": "hello"}, last])
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Once upon"}]
    with server.http() as http:
        options = {"continue_final_message": continues, "add_generation_prompt": not continues}
        counted = http.post("/tokenize", json={"messages": messages, **options}).json()["count"]
    assert answer["usage"]["input_tokens"] == counted


def test_tools_that_are_allowed(server):
    other = WEATHER | {"name": "get_time"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    response = created(server, "call", tools=[WEATHER, other], tool_choice=choice)
    assert (shape(response["output"]), response["tool_choice"]) == ([CALL], choice)
    choice["tools"].append({"type": "function", "name": "get_weather"})
    assert shape(created(server, "call", tools=[WEATHER, other], tool_choice=choice)["output"]) == [W]


def test_a_response_that_is_over_cannot_be_cancelled(server):
    response = created(server)
    with server.http() as http:
        assert http.post(f"{PATH}/{response['id']}/cancel").status_code == 400


def test_a_stream_can_be_cancelled(slow):
    found = []
    with slow.http() as http:
        body = {"input": "hello", "stream": True, "ignore_eos": True}
        with http.stream("POST", PATH, json=body) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: "))
            response = json.loads(next(lines).removeprefix("data: "))["response"]
            with slow.http() as other:
                assert other.get(f"{PATH}/{response['id']}").json()["status"] == "in_progress"
                error = other.post(PATH, json={"input": "a", "previous_response_id": response["id"]}).json()["error"]
                assert error["param"] == "previous_response_id"
                assert other.post(f"{PATH}/{response['id']}/cancel").json()["status"] == "cancelled"
                assert other.post(f"{PATH}/{response['id']}/cancel").json()["status"] == "cancelled"
            found = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert (found[-1]["type"], found[-1]["response"]["status"]) == ("response.failed", "cancelled")
        assert http.get(f"{PATH}/{response['id']}").json()["status"] == "cancelled"


def test_a_client_that_goes_away_cancels_its_response(slow):
    with slow.http() as http:
        with http.stream("POST", PATH, json={"input": "hello", "stream": True, "ignore_eos": True}) as stream:
            line = next(line for line in stream.iter_lines() if line.startswith("data: "))
            response = json.loads(line.removeprefix("data: "))["response"]
        wait_until(lambda: http.get(f"{PATH}/{response['id']}").json()["status"] == "cancelled")


REFUSED = [
    ({"input": 5}, "input"),
    ({"input": [{"type": "item_reference"}]}, "input.0.id"),
    ({"input": [{"type": "poem", "id": "a"}]}, "input.0.type"),
    ({"input": [{"content": "a"}]}, "input.0.role"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.arguments"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input.0.call_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [{"type": "custom"}]}, "tools.0.name"),
    ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "f"}]}, "input.0.input"),
    ({"tools": [{"type": "function"}]}, "tools.0.name"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "strin"}}}}, "text.format"),
    ({"text": {"format": {"type": "poem"}}}, "text.format"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["f"]}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
    ({"background": True, "store": False}, "store"),
    ({"truncation": "sometimes"}, "truncation"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": []}, "input"),
    ({"input": [{"role": "", "content": "a"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_meant_is_refused_by_name(server, fields, param):
    response = post(server, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_log_probabilities_of_the_text(server):
    """The same as in the chat, for each token, and the same streamed and whole."""
    asked = {"include": [LOGPROBS], "top_logprobs": 2}
    whole = created(server, **asked)
    (item,) = whole["output"]
    (part,) = item["content"]
    with server.http() as http:
        messages = [{"role": "user", "content": "hello"}]
        body = {"messages": messages, "seed": SEEDS["plain"], "logprobs": True, "top_logprobs": 2}
        chat = http.post("/v1/chat/completions", json=body).json()
        assert http.get(f"{PATH}/{whole['id']}").json()["output"] == whole["output"]
    assert part["logprobs"] == chat["choices"][0]["logprobs"]["content"]
    assert len(part["logprobs"]) == whole["usage"]["output_tokens"]
    assert (whole["top_logprobs"], len(part["logprobs"][0]["top_logprobs"])) == (2, 2)

    found = events(server, **asked)
    assert kinds(found) == ["created", "in_progress", *TEXT_EVENTS, "completed"]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == part["logprobs"]
    in_deltas = [entry for event in found if "delta" in event for entry in event["logprobs"]]
    (done,) = (event for event in found if event["type"] == "response.output_text.done")
    assert in_deltas == done["logprobs"]
    assert [entry["logprob"] for entry in in_deltas] == [entry["logprob"] for entry in part["logprobs"]]
    assert "bytes" not in in_deltas[0]
    assert created(server, include=["reasoning.encrypted_content"])["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_texts_next_to_calls_have_their_own_log_probabilities(server, script):
    """Tokens of calls have none. A text at the end also has those of the end of the turn."""
    asked = {"include": [LOGPROBS], "top_logprobs": 1, "tools": [WEATHER]}
    whole = created(server, script, **asked)
    texts = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    assert shape(whole["output"]) == OUTPUTS[script]
    for text in texts:
        written = bytes(byte for entry in text["logprobs"] for byte in entry["bytes"]).decode()
        assert written == text["text"] + ("<|eot_id|>" if text is texts[-1] else "")
    if script in ("plain", "nothing"):
        alone = created(server, script, include=[LOGPROBS], top_logprobs=1)
        assert texts == alone["output"][0]["content"]

    found = events(server, script, **asked)
    assert shape(found[-1]["response"]["output"]) == OUTPUTS[script]
    for index, item in enumerate(found[-1]["response"]["output"]):
        if item["type"] == "message":
            own = [event for event in found if event.get("output_index") == index]
            in_deltas = [entry["logprob"] for event in own if "delta" in event for entry in event["logprobs"]]
            assert in_deltas == [entry["logprob"] for entry in item["content"][0]["logprobs"]]
            assert item["content"][0]["logprobs"] == whole["output"][index]["content"][0]["logprobs"]


def test_input_items_are_listed_page_by_page(server):
    call = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": ARGUMENTS}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    first = created(server, input=[{"role": "user", "content": "hello"}, call, result], tools=[WEATHER])
    second = created(server, input=[{"role": "user", "content": [{"type": "input_text", "text": "and now?"}]}],
                     previous_response_id=first["id"], tools=[WEATHER])  # fmt: skip
    with server.client() as client:
        newest = client.responses.input_items.list(second["id"])
        assert [item.type for item in newest.data] == [
            *("message", "message", "function_call_output", "function_call", "message")
        ]
        assert newest.data[0].content[0].text == "and now?"
        assert newest.data[1].content[0].text == SCRIPTS["plain"]
        assert (newest.data[2].output, newest.data[3].arguments) == ("rain", ARGUMENTS)
        assert not newest.has_more
        oldest = list(client.responses.input_items.list(second["id"], order="asc", limit=2))  # all pages
        assert [item.id for item in oldest] == [item.id for item in reversed(newest.data)]
        assert len({item.id for item in oldest}) == 5
    with server.http() as http:
        for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "item_0"}):
            refused = http.get(f"{PATH}/{second['id']}/input_items", params=query)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(query)))
        assert http.get(f"{PATH}/resp-none/input_items").status_code == 404
