"""/inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from batcher.request import SamplingParams
from server.engine import wire
from server.settings import GenerationDefaults
from tests.server.conftest import REPLY
from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, post_all, state_of
from tests.server.support.tokenizers import BOS, EOT, VOCAB_SIZE

PATH = "/inference/v1/generate"
IDS = [BOS, *b"hello"]
REPLY_IDS = [*REPLY.encode(), EOT]
SCORES = {"logprobs": 2, "prompt_logprobs": 1}


def body(params: dict | None = None, **fields: object) -> dict:
    return {"token_ids": IDS, "sampling_params": params or {}} | fields


def ask(server, params: dict | None = None, **fields: object) -> dict:
    answer = server.post(PATH, body(params, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_whole_answer(scripted):
    answer = ask(scripted, request_id="mine", return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": REPLY_IDS,
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": len(REPLY_IDS)}],
    }
    assert answer["request_id"] == "generate-tokens-mine"
    assert (answer["output_mode"], answer["model"], answer["prompt_token_ids"]) == ("tokens", "test-model", IDS)
    assert answer["usage"]["prompt_tokens"] == len(IDS)
    assert answer["usage"]["completion_tokens"] == len(REPLY_IDS)
    assert (answer["prompt_logprobs"], answer["kv_transfer_params"]) == (None, None)
    assert "prompt_token_ids" not in ask(scripted)


def test_the_tokens_are_those_of_a_completion(scripted):
    for params in ({"max_tokens": 7}, {"stop": "wörld"}, {"stop_token_ids": [ord("l")]}, {"n": 2, "max_tokens": 3}):
        answer = ask(scripted, params)
        asked = {"prompt": IDS, "max_tokens": 1000, "return_token_ids": True} | params
        same = scripted.post(COMPLETIONS, asked).json()
        for choice, other in zip(answer["choices"], same["choices"], strict=True):
            for field in ("index", "token_ids", "finish_reason", "stop_reason"):
                assert choice[field] == other[field]


def test_a_stream_has_the_tokens_of_the_whole_and_its_usage(scripted):
    usage = {"include_usage": True}
    events = scripted.events(
        PATH, body({"n": 2, "logprobs": 1}, stream=True, stream_options=usage, return_token_ids=True)
    )
    *chunks, last = events
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [id for choice in own for id in choice["token_ids"]] == REPLY_IDS
        scored = [entry["token_id"] for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert scored == REPLY_IDS
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
    assert [chunk["prompt_token_ids"] for chunk in events if "prompt_token_ids" in chunk] == [IDS]
    assert "prompt_token_ids" in chunks[0]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * len(REPLY_IDS)
    assert len({chunk["request_id"] for chunk in events}) == 1


def test_logprobs(scripted):
    """The engine's: a token has -0.5, and its neighbours follow."""
    answer = ask(scripted, SCORES | {"max_tokens": 2})
    (choice,) = answer["choices"]
    first = REPLY_IDS[0]

    def entry(id: int, logprob: float, rank: int) -> dict:
        return {"token": f"token_id:{id}", "token_id": id, "logprob": logprob, "rank": rank}

    top = [entry(first, -0.5, 1), entry(first + 1, -1.5, 2)]
    assert choice["logprobs"]["content"][0] == top[0] | {"bytes": None, "top_logprobs": top}
    assert len(choice["logprobs"]["content"]) == 2
    nothing, *others = answer["prompt_logprobs"]
    assert nothing is None
    assert [set(entries) for entries in others] == [{str(id)} for id in IDS[1:]]
    (alone,) = ask(scripted, {"logprobs": 0, "max_tokens": 1})["choices"]
    assert [top["token_id"] for top in alone["logprobs"]["content"][0]["top_logprobs"]] == [first]


def test_parameters_that_are_left_out_have_vllms_defaults():
    client = StubClient(DONE)
    defaults = GenerationDefaults(temperature=0.2, top_p=0.5, top_k=7, repetition_penalty=1.5, max_new_tokens=9)
    given = {"temperature": 0.0, "min_tokens": 1, "seed": 5, "allowed_token_ids": [1, 2], "logit_bias": {"3": 1.0}}
    state = state_of(client, generation_defaults=defaults)
    bodies = [{"token_ids": IDS}, body(given | {"max_tokens": 4}, priority=3), body({})]
    assert [answer.status_code for answer in post_all(state, PATH, bodies)] == [200] * 3
    free, bound, empty = (request.sampling for request in client.submitted)
    assert free == empty == SamplingParams(max_tokens=9)  # what the server gives any request
    expected = given | {"max_tokens": 4, "allowed_token_ids": (1, 2), "logit_bias": ((3, 1.0),)}
    assert bound == SamplingParams(**expected)
    assert client.submitted[1].priority == 3
    assert client.submitted[0].prompt == client.submitted[1].prompt


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"sampling_params": {}}, "token_ids"),
        (body(token_ids=[]), "token_ids"),
        (body(token_ids=[VOCAB_SIZE]), "token_ids"),
        (body(token_ids="hello"), "token_ids"),
        (body(token_ids=[1] * 64), "input_tokens"),
        (body({"temperature": -1}), "temperature"),
        (body({"temperature": "hot"}), "sampling_params.temperature"),
        (body({"logprobs": 21}), "logprobs"),
        (body({"best_of": 2}), "sampling_params.best_of"),
        (body({"extra_args": {"a": 1}}), "sampling_params.extra_args"),
        (body(max_tokens=3), "max_tokens"),
        (body(features={"mm_hashes": {"image": ["a"]}}), "features"),
        (body(kv_transfer_params={"do_remote_decode": True}), "kv_transfer_params"),
        (body(output_mode="text"), "output_mode"),
        (body(messages=[]), None),
    ],
)
def test_what_is_refused(asked, param):
    answer = call(state_of(StubClient(DONE)), "POST", PATH, json=asked)
    assert answer.status_code == (200 if param is None else 400), answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param


def test_logprobs_without_a_limit_of_tokens_lower_the_limit():
    client = StubClient(DONE)
    client.info = msgspec.structs.replace(client.info, max_model_len=4096)
    state = state_of(client, max_request_logprobs=300)
    fits, too_many = post_all(state, PATH, [body({"logprobs": 2}), body({"logprobs": 2, "max_tokens": 101})])
    assert fits.status_code == 200
    assert client.submitted[0].sampling.max_tokens == 100
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "logprobs")


def test_a_long_prompt_of_ids_and_fields_without_effect():
    client = StubClient(DONE)
    client.info = msgspec.structs.replace(client.info, max_model_len=200_000)
    params = {"detokenize": False, "skip_special_tokens": False, "output_kind": 2, "max_tokens": 1}
    long = body(params, token_ids=[7] * 100_000, output_mode="tokens", features=None, kv_transfer_params=None)
    (answer,) = post_all(state_of(client, strict_fields=True), PATH, [long])
    assert answer.status_code == 200, answer.text
    assert len(client.submitted[0].prompt) == 400_000


FIRST = {"max_tokens": 3, "temperature": 0.5, "logprobs": 2, "seed": 7, "stop": ["x"], "logit_bias": {"5": 1.5}, "n": 2}
SECOND = {"top_k": -1, "min_tokens": 2, "ignore_eos": True, "priority": 3, "cache_salt": "s"}
SECOND |= {"truncate_prompt_tokens": 4, "bad_words": ["ab"], "allowed_token_ids": [97, 98], "top_p": 0.5}
THIRD = {
    "logprob_token_ids": [3, 3, 4],
    "stop_token_ids": [9],
    "stream": True,
    "stream_options": {"include_usage": True},
}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}}


@pytest.mark.parametrize("fields", [FIRST, SECOND | {"structured_outputs": {"choice": ["a", "b"]}}, THIRD, SCHEMA])
@pytest.mark.parametrize("chat", [False, True])
def test_a_rendered_request_is_the_request(chat, fields):
    """What the engine gets of it is what it gets of the request itself."""
    own = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": ["hello", "no"]}
    if chat and "logprobs" in fields:
        fields = fields | {"logprobs": True, "top_logprobs": fields["logprobs"]}
    client = StubClient(DONE)
    defaults = GenerationDefaults(temperature=0.25, top_k=9, repetition_penalty=1.5)
    state = state_of(client, generation_defaults=defaults)
    path = "/v1/chat/completions" if chat else COMPLETIONS
    assert call(state, "POST", path, json=own | fields).status_code == 200
    asked, client.submitted = client.submitted, []
    answer = call(state, "POST", f"{path}/render", json=own | fields)
    assert (answer.status_code, client.submitted) == (200, []), answer.text
    rendered = [answer.json()] if chat else answer.json()
    assert len(rendered) == len(own.get("prompt", "1"))
    for response in post_all(state, PATH, rendered):
        assert response.status_code == 200, response.text
    for before, after in zip(*map(wire.requests_from_wire, (asked, client.submitted)), strict=True):
        assert before.sampling == after.sampling
        assert (before.prompt, before.priority, before.cache_salt) == (after.prompt, after.priority, after.cache_salt)


def test_a_grammar_that_cannot_be_rendered_is_named():
    template = (Path(__file__).parents[1] / "support/llama_tools.jinja").read_text()
    state = state_of(StubClient(DONE), template)
    state.engine.info = wire.EngineInfo(max_model_len=999, vocab_size=VOCAB_SIZE)
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": [tool], "tool_choice": "required"}
    answer = call(state, "POST", "/v1/chat/completions/render", json=body)
    assert (answer.status_code, answer.headers["x-unenforced-keywords"]) == (200, "tools")
    assert "structured_outputs" not in answer.json()["sampling_params"]
    answer = call(state, "POST", "/v1/chat/completions/render", json=body | {"max_tokens": 1000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
