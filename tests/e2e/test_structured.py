"""Structured output on the demo: what comes is of the grammar, whatever else is asked for, whoever shares the steps."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from jsonschema import validate

from server.grammar.matcher import TokenGrammars, vocabulary_of
from tests.server.grammar.test_forms import HOSTILE
from tests.server.support.canary import canary

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is 47 + 35?"}]
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}


def ask(client, *, temperature=1.0, max_tokens=300, **body):
    extra = {
        name: body.pop(name) for name in list(body) if name not in ("response_format", "n", "seed", "stop", "logprobs")
    }
    return client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=temperature, max_tokens=max_tokens, extra_body=extra, **body
    )


def text_of(answer) -> str:
    return answer.choices[0].message.content


def as_schema(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


SET = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3, "uniqueItems": True}


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_grammar_cannot_hold_is_said_in_a_header_and_in_the_log(server, stream):
    asked = {"type": "object", "properties": {"ü": SET}, "required": ["ü"], "additionalProperties": False}
    body = {"model": "demo", "messages": QUESTION, "stream": stream, "max_tokens": 100}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": asked}}
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json={**body, "response_format": format})
        assert answer.status_code == 200
        assert answer.headers["x-unenforced-keywords"] == "uniqueItems"
        if not stream:
            value = json.loads(answer.json()["choices"][0]["message"]["content"])
            validate(value, {**asked, "properties": {"ü": SET | {"uniqueItems": False}}})
        format["json_schema"]["strict"] = True
        refused = http.post("/v1/chat/completions", json={**body, "response_format": format})
        assert refused.status_code == 400
        assert "the keyword uniqueItems" in refused.json()["error"]["message"]
        held = http.post("/v1/chat/completions", json={**body, "response_format": {"type": "json_object"}})
        assert "x-unenforced-keywords" not in held.headers


@pytest.mark.parametrize(("strict", "choice", "status"), [(False, "required", 200), (True, "auto", 400)])
def test_the_schema_of_a_tool_is_a_hint_unless_it_is_strict(server, strict, choice, status):
    tool = {"name": "f", "strict": strict, "parameters": {"type": "object", "properties": {"x": SET}}}
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 60, "tool_choice": choice}
    with server.http() as http:
        tools = [{"type": "function", "function": tool}]
        answer = http.post("/v1/chat/completions", json={**body, "tools": tools})
        assert answer.status_code == status
        if status == 200:
            assert answer.headers["x-unenforced-keywords"] == "f: uniqueItems"
        else:
            assert "f: a grammar cannot hold the keyword uniqueItems" in answer.json()["error"]["message"]


def test_every_form_and_route(server):
    forms = [
        ({"guided_regex": r"[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ["red", "green", "blaü"]}, "red|green|blaü"),
        ({"guided_grammar": 'start: "<" /[xy]+/ ">"'}, "<[xy]+>"),
        ({"structured_outputs": {"regex": "(ab|cd){2,4}"}}, "(ab|cd){2,4}"),
        ({"structured_outputs": {"choice": ["1", "2"]}}, "[12]"),
        ({"guided_choice": [""]}, ""),
    ]
    with server.client() as client:
        for extra, pattern in forms:
            answer = ask(client, **extra)
            assert re.fullmatch(pattern, text_of(answer)) or answer.choices[0].finish_reason == "length", extra
            answer = client.completions.create(
                model="demo", prompt="Once", max_tokens=200, temperature=1, extra_body=extra
            ).choices[0]
            assert re.fullmatch(pattern, answer.text) or answer.finish_reason == "length", extra
        assert isinstance(json.loads(text_of(ask(client, guided_json=SUM))), dict)


def test_together_with_everything_else(server):
    everything = {
        "top_k": 50,
        "min_p": 0.001,
        "min_tokens": 60,  # more than the answer can have
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "logit_bias": {"5": 3.0},
    }
    with server.client() as client:
        answer = ask(client, response_format=as_schema(SUM), n=3, seed=8, logprobs=True, **everything)
    assert len(answer.choices) == 3
    for choice in answer.choices:
        validate(json.loads(choice.message.content), SUM)
        assert choice.finish_reason == "stop"
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
        assert all(-10_000 < entry.logprob <= 0 for entry in choice.logprobs.content)


def test_hostile_grammars_cost_their_senders_only(server):
    ambiguous = 'start: e\ne: e e | "a" | "b" | e e e | ""'
    hostile = [{"guided_json": schema} for schema in HOSTILE.values()] + [{"guided_grammar": ambiguous}]

    def attack(body) -> str:
        try:
            return ask(client, max_tokens=40, **body).choices[0].finish_reason
        except openai.BadRequestError:
            return "refused"

    with server.client() as client, ThreadPoolExecutor(8) as pool:
        with canary(server):
            ends = list(pool.map(attack, hostile))
        assert set(ends) <= {"stop", "length", "refused"}
        assert json.loads(text_of(ask(client, guided_json=SUM)))


def test_offline_and_batch_files_take_the_same_fields(built, monkeypatch):
    from scripts import llm

    def build(settings, report, tokenizer, **_):
        size, ends = built.info.vocab_size, built.plan.weights.eos_token_ids
        grammars = TokenGrammars(lambda: vocabulary_of(tokenizer(size), vocab_size=size, end_ids=ends))
        return built.engine(grammars=grammars), built, None

    monkeypatch.setattr(llm, "build", build)
    with llm.LLM("demo") as offline:
        params = {"guided_json": SUM, "temperature": 1, "max_tokens": 300}
        (chat,) = offline.chat([QUESTION], params)
        (completion,) = offline.generate(["Once"], params | {"seed": 2})
        with pytest.raises(llm.RefusedError, match="guided_json: Invalid type"):
            offline.generate(["Once"], {"guided_json": {"type": "x"}})
    for result in (chat, completion):
        validate(json.loads(result.outputs[0].text), SUM)
