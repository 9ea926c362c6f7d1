"""Fields that a request type does not declare: refused by name, without effect, or unknown. And values in lax forms."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.request import fields as table
from server.api.request.body import MAX_NAMES, BodyReader
from server.api.request.fields import HARMLESS, SYNONYMS, is_ignored, refusal, served_name
from server.api.request.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from server.api.routes.messages.schemas import MessagesRequest
from server.api.routes.responses.schemas import ResponsesRequest
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.openai_schemas import SCHEMAS
from tests.server.support.running import ECHO, running_server, server_of
from tests.server.support.stub_app import DONE, StubClient, call, post_all, state_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
BASE = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/tokenize": {"messages": HELLO},
}
KINDS = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/tokenize": TokenizeRequest,
}
NOT_HARMLESS = {"a": "value that is none of the harmless ones"}
GENERATING = [path for path in KINDS if path != "/tokenize"]
IN_TABLE = {
    name
    for name in (*table._WHY_GENERATING, *table._WHY_ANYWHERE, *table._WHY_TUNES, *table._COUNTERPARTS, *SYNONYMS)
    if "." not in name
}
# Their names say what only their routes do, and no client sends them elsewhere.
OF_ONE_ROUTE = {"include", "truncation"}
# Fields of other servers, by their documentation, that change an answer.
FOREIGN = {
    "vLLM": "best_of logits_processors prompt_embeds suffix vllm_xargs",
    "SGLang": """stop_regex lora_path lora_id custom_logit_processor custom_params return_hidden_states session_params
        return_routed_experts bootstrap_host logprob_start_len top_logprobs_num return_logprob
        input_ids input_embeds image_data""",
    "TGI": """adapter_id inputs parameters details decoder_input_details top_n_tokens watermark guideline typical_p
        return_full_text""",
    "llama.cpp": """dynatemp_range xtc_probability dry_multiplier mirostat samplers n_keep n_indent t_max_predict_ms
        lora min_keep n_probs response_fields post_sampling_probs input_prefix input_suffix input_extra top_n_sigma""",
    "Ollama": "format options raw template images context system num_ctx mirostat tfs_z",
    "LMDeploy": "adapter_name repetition_ngram_size return_logits return_ppl bad_stop_words migration_request",
    "TensorRT-LLM": """beam_width beam_search_diversity_rate end_id top_p_min top_p_decay lora_request embedding_bias
        disaggregated_params return_context_logits return_generation_logits prompt_ignore_length guided_decoding""",
    "transformers": """max_length min_length max_time num_beams num_beam_groups diversity_penalty penalty_alpha top_h
        epsilon_cutoff eta_cutoff encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
        bad_words_ids force_words_ids constraints forced_bos_token_id forced_eos_token_id suppress_tokens
        exponential_decay_length_penalty begin_suppress_tokens sequence_bias token_healing guidance_scale
        negative_prompt_ids output_scores output_logits output_hidden_states output_attentions eos_token_id
        stopping_criteria watermarking_config early_stopping dola_layers generation_config""",
    "OpenAI": "audio modalities functions function_call web_search_options moderation",
    "Anthropic": "container mcp_servers",
}


strict = server_of(EchoConfig(), strict_fields=True)


def post(server, path=CHAT, **fields):
    return server.post(path, BASE[path] | fields)


def undeclared(path):
    return sorted(IN_TABLE - set(KINDS[path].__struct_fields__))


def refusals(path, *, tune):
    found = {
        name: refusal(KINDS[path], "", name) for name in undeclared(path) if served_name(KINDS[path], name) is None
    }
    return {name: refused for name, refused in found.items() if refused is not None and refused.tunes == tune}


@pytest.mark.parametrize("path", KINDS)
def test_a_field_that_would_change_the_answer_is_refused_by_name(path):
    names = list(refusals(path, tune=False))
    assert len(names) > 20
    responses = post_all(state_of(StubClient(DONE)), path, [BASE[path] | {name: NOT_HARMLESS} for name in names])
    for name, response in zip(names, responses, strict=True):
        assert response.status_code == 400, name
        error = response.json()["error"]
        if path != "/v1/messages":  # Anthropic's errors do not have them
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert error["message"].startswith(f"{name}: ")


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("server", FOREIGN)
def test_no_field_of_another_server_is_dropped(path, server):
    names = [name for name in FOREIGN[server].split() if name not in KINDS[path].__struct_fields__]
    responses = post_all(state_of(StubClient(DONE)), path, [BASE[path] | {name: 7} for name in names])
    answered = {name for name, answer in zip(names, responses, strict=True) if answer.status_code == 200}
    assert answered == set()


@pytest.mark.parametrize("path", KINDS)
def test_it_is_accepted_with_a_value_that_changes_nothing(path):
    refused = refusals(path, tune=False)
    fields = [
        {name: value}
        for name, why in refused.items()
        for value in (None, *([] if True in why.harmless else [False]), *why.harmless)
    ]
    responses = post_all(state_of(StubClient(DONE)), path, [BASE[path] | field for field in fields])
    assert [field for field, answer in zip(fields, responses, strict=True) if answer.status_code != 200] == []


@pytest.mark.parametrize(
    ("path", "name"),
    [(CHAT, "do_sample"), (CHAT, "separate_reasoning"), ("/v1/messages", "skip_special_tokens")]
    + [("/v1/messages", "parallel_tool_calls")],
)
def test_false_changes_the_answer_where_true_is_the_rule(path, name):
    answers = post_all(state_of(StubClient(DONE)), path, [BASE[path] | {name: value} for value in (True, False)])
    assert [answer.status_code for answer in answers] == [200, 400]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
def test_what_one_route_serves_another_does_not_ignore(path):
    """Each field of a route that generates is served by the others, or refused, or has no effect anywhere."""
    fields = {name for other in GENERATING for name in KINDS[other].__struct_fields__} | IN_TABLE
    kind = KINDS[path]
    known = {*kind.__struct_fields__, *OF_ONE_ROUTE}
    unknown = {name for name in fields - known if not is_ignored("", name) and served_name(kind, name) is None}
    assert len(fields) > 200
    assert {name for name in unknown if refusal(kind, "", name) is None} == set()


def test_a_field_is_in_one_part_of_the_table():
    parts = [set(part) for part in (table._WHY_GENERATING, table._WHY_ANYWHERE, table._WHY_TUNES, table._IGNORED)]
    assert sum(map(len, parts)) == len(set.union(*parts))
    assert not SYNONYMS.keys() & table._IGNORED
    assert {name for name in HARMLESS if "." not in name} <= IN_TABLE | table._OF_OTHER_ROUTES


SAME = {  # as OpenAI's and vLLM's names of the fields say it
    "max_new_tokens": ("max_tokens", 2),
    "num_predict": ("max_tokens", 2),
    "n_predict": ("max_tokens", 2),
    "min_new_tokens": ("min_tokens", 3),
    "random_seed": ("seed", 7),
    "sampling_seed": ("seed", 7),
    "n_cmpl": ("n", 2),
    "num_return_sequences": ("n", 2),
    "repeat_penalty": ("repetition_penalty", 1.5),
    "regex": ("guided_regex", "[ab]{3}"),
    "choice": ("guided_choice", ["yes", "no"]),
    "ebnf": ("guided_grammar", 'root ::= "yes"'),
    "grammar": ("guided_grammar", 'start: "yes"'),
    "schema": ("guided_json", {"const": 5}),
    "json_schema": ("guided_json", {"const": 5}),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_another_name_of_a_field_is_served(path):
    client = StubClient(DONE)
    state = state_of(client)
    base = {name: value for name, value in BASE[path].items() if name != "max_tokens"} | {"seed": 5}

    def submitted(own, **fields):
        before = len(client.submitted)
        body = {name: value for name, value in base.items() if name != own} | fields
        assert call(state, "POST", path, json=body).status_code == 200, fields
        return [request.sampling for request in client.submitted[before:]]

    plain = submitted(None)
    for name, (own, value) in SAME.items():
        assert submitted(own, **{name: value}) == submitted(own, **{own: value}) != plain, name


def test_other_names_of_stop_strings_are_served(echo):
    for name in ("stop", "stop_sequences", "stop_strings", "stop_words"):
        choice = post(echo, max_tokens=9, **{name: ["er"]}).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("us", "stop"), name


def test_a_field_with_two_values_is_refused():
    answer = call(state_of(StubClient(DONE)), "POST", CHAT, json=BASE[CHAT] | {"max_new_tokens": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_new_tokens")
    for fields in ({"max_new_tokens": 1}, {"max_new_tokens": None}, {"max_tokens": None, "max_new_tokens": 3}):
        assert call(state_of(StubClient(DONE)), "POST", CHAT, json=BASE[CHAT] | fields).status_code == 200


@pytest.mark.skipif(not SCHEMAS.is_file(), reason="OpenAI's schemas are not in ../shared/data: no field is compared")
@pytest.mark.parametrize(
    ("kind", "name"),
    [(ChatRequest, "CreateChatCompletionRequest"), (CompletionRequest, "CreateCompletionRequest")],
)
def test_every_field_of_the_published_schema_is_known(kind, name):
    schemas = json.loads(SCHEMAS.read_text())["components"]["schemas"]

    def properties(schema: dict) -> set[str]:
        if "$ref" in schema:
            return properties(schemas[schema["$ref"].rpartition("/")[2]])
        return set(schema.get("properties", ())).union(*map(properties, schema.get("allOf", ())))

    published = properties(schemas[name])
    assert len(published) > 15
    others = {name for name in published - set(kind.__struct_fields__) if not is_ignored("", name)}
    assert {name for name in others if refusal(kind, "", name) is None} == set()


@pytest.mark.parametrize("path", GENERATING)
def test_a_field_that_only_tunes_is_accepted_unless_the_server_is_strict(path):
    names = list(refusals(path, tune=True))
    assert "reasoning_effort" in names
    fields = [BASE[path] | {name: NOT_HARMLESS} for name in names]
    answers = post_all(state_of(StubClient(DONE)), path, fields)
    assert [name for name, answer in zip(names, answers, strict=True) if answer.status_code != 200] == []
    refused = post_all(state_of(StubClient(DONE), strict_fields=True), path, fields)
    assert {answer.status_code for answer in refused} == {400}


def test_fields_without_effect_and_unknown_ones_are_named_in_the_log_once(tmp_path):
    with running_server(tmp_path, ECHO, EchoConfig()) as server:
        for _ in range(3):
            message = HELLO[0] | {"mood": "fine"}
            unknown = {"messages": [message], "frobnicate": 1, "user": "me", "stream_options": None}
            assert post(server, **unknown, reasoning_effort="low").status_code == 200
    assert server.log.count("the field 'reasoning_effort' has no effect here") == 1
    assert server.log.count("frobnicate") == 1
    assert server.log.count("messages.0.mood") == 1
    assert "user" not in server.log


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"messages": [HELLO[0], HELLO[0] | {"mood": 1}]}, "messages.1.mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages.0.content.0.x",
        ),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options.include"),
        ({"tools": [TOOL, TOOL | {"mood": 1}], "tool_choice": "none"}, "tools.1.mood"),
        ({"tools": [{**TOOL, "function": {"name": "g", "mood": 1}}]}, "tools.0.function.mood"),
        ({"response_format": {"type": "json_object", "mood": 1}}, "response_format.mood"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "mood": 1}}},
            "response_format.json_schema.mood",
        ),
    ],
    ids=str,
)
def test_strict_fields_refuse_what_is_unknown(strict, fields, param):
    response = post(strict, **fields)
    assert response.status_code == 400
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (param, "unknown_parameter")
    assert post(strict, user="me", store=True, tools=None).status_code == 200


def test_strict_fields_know_a_structural_tag(strict):
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tags = {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<", "content": content, "end": ">"}]}
    assert post(strict, response_format={"type": "structural_tag", "format": tags}).status_code == 200
    refused = post(strict, response_format={"type": "structural_tag", "format": {**tags, "mood": 1}})
    assert refused.status_code == 400
    assert "the field `mood`" in refused.json()["error"]["message"]


def test_strict_fields_hold_for_the_parts_of_other_routes(strict):
    format_with_more = {"type": "json_schema", "name": "a", "schema": {}, "mood": 1}
    refused = post(strict, "/v1/responses", text={"format": format_with_more})
    assert refused.json()["error"]["param"] == "text.format.mood"
    refused = post(strict, "/v1/responses", tools=[{"type": "function", "name": "f", "mood": 1}])
    assert refused.json()["error"]["param"] == "tools.0.mood"
    refused = post(strict, "/v1/messages", tools=[{"name": "f", "mood": 1}])
    assert refused.json()["error"]["message"].startswith("tools.0.mood: ")
    format_with_more = {"type": "json_schema", "schema": {}, "mood": 1}
    refused = post(strict, "/v1/messages", output_config={"format": format_with_more})
    assert refused.json()["error"]["message"].startswith("output_config.format.mood: ")


def test_a_tool_may_say_how_it_is_cached():
    state = state_of(StubClient(DONE), strict_fields=True)
    mark = {"cache_control": {"type": "ephemeral"}}
    for path, tool, none in (
        (CHAT, {"type": "function", "function": TOOL["function"] | mark}, "none"),
        ("/v1/responses", {"type": "function", "name": "f"}, "none"),
        ("/v1/messages", {"name": "f"}, {"type": "none"}),
    ):
        answer = call(state, "POST", path, json=BASE[path] | {"tools": [tool | mark], "tool_choice": none})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ["best_of", "messages"])
def test_a_refused_field_that_is_no_text_is_the_clients_fault(name):
    body = b'{"prompt": "a", "%s": "\xff"}' % name.encode()
    headers = {"content-type": "application/json"}
    assert call(state_of(StubClient(DONE)), "POST", COMPLETIONS, content=body, headers=headers).status_code == 400


@pytest.mark.parametrize("tools", [5, "f", [5], [[5]], [TOOL, 5], {"type": "function"}, [None]], ids=str)
def test_tools_of_another_form_are_named(tools):
    response = call(state_of(StubClient(DONE)), "POST", CHAT, json=BASE[CHAT] | {"tools": tools})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_fields_of_the_chat_reach_the_engine_from_other_routes():
    client = StubClient(DONE)
    state = state_of(client)
    common = {"priority": 3, "timeout_s": 60}
    more = {"min_tokens": 1, "allowed_token_ids": [97, 98], "bad_words": ["c"], "truncate_prompt_tokens": 5}
    answers = [
        call(state, "POST", path, json=BASE[path] | fields)
        for path, fields in (("/v1/responses", common | more), ("/v1/messages", common))
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    of_response, of_message = client.submitted
    for submitted in client.submitted:
        assert submitted.priority == 3
        assert 50 < submitted.deadline_s <= 60
    sampling = of_response.sampling
    assert (sampling.min_tokens, sampling.allowed_token_ids, sampling.bad_words) == (1, (97, 98), ((99,),))
    assert len(of_response.prompt) < len(of_message.prompt)
    limited = BASE["/v1/responses"] | {"structured_outputs": {"choice": ["a"]}}
    assert call(state, "POST", "/v1/responses", json=limited).status_code == 200
    assert client.submitted[-1].sampling.grammar is not None


def test_strict_fields_hold_for_tokenize(strict):
    with strict.http() as http:
        assert http.post("/tokenize", json={"prompt": "a", "x": 1}).json()["error"]["param"] == "x"
        assert http.post("/detokenize", json={"tokens": [97], "x": 1}).json()["error"]["param"] == "x"


def test_names_of_unknown_fields_do_not_fill_the_log(caplog):
    reader = BodyReader(ChatRequest, strict=False)
    for i in range(3 * MAX_NAMES):
        reader._unknown("x" * 10, f"x{i}")
    assert len(caplog.records) == MAX_NAMES


leaves = st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
)


unknown_fields = st.dictionaries(st.text().map("§{}".format), json_values)


@given(unknown_fields, st.lists(unknown_fields, max_size=3))
def test_what_is_declared_stays_as_it_was(others, message_others):
    reader = BodyReader(ChatRequest, strict=False)
    messages = [{"role": "user", "content": f"text {i}"} for i in range(len(message_others))]
    fields = {"messages": messages, "seed": 5, "chat_template_kwargs": {"a": [1, {"b": None}]}}
    body = others | fields | {"messages": [more | own for more, own in zip(message_others, messages, strict=True)]}
    assert json.loads(reader._declared(json.dumps(body).encode(), ChatRequest, "")) == fields


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 3.0},
        {"max_tokens": "3"},
        {"n": 1e0, "max_tokens": "3.0"},
        {"temperature": "0.5", "max_tokens": 3},
        {"temperature": 2.5, "max_tokens": 3},
        {"seed": "5", "stream": "false", "max_tokens": 3},
        {"stream": 0, "max_tokens": 3},
    ],
    ids=str,
)
def test_numbers_in_other_forms(echo, fields):
    """As pydantic's lax mode, which clients of other servers rely on."""
    for path in (CHAT, COMPLETIONS):
        response = post(echo, path, **fields)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 3
