from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.request import SamplingParams
from server.api.request.sampling import checked_sampling
from server.api.request.schemas import CompletionRequest
from server.engine import wire
from server.settings import GenerationDefaults
from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, state_of

VOCAB = 1000


def params(body: CompletionRequest, defaults: GenerationDefaults | None = None, **options) -> SamplingParams:
    later = {"max_tokens": 10, "choice": 0, "logprobs": None, "prompt_logprobs": None} | options
    return checked_sampling(body, defaults or GenerationDefaults(), vocab_size=VOCAB).params(**later)


def test_nothing_said_gives_openais_defaults():
    assert params(CompletionRequest()) == SamplingParams(max_tokens=10)


def test_everything_said_arrives():
    same = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1.5, "seed": 11}
    same |= {"frequency_penalty": -1.5, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
    same |= {"sampled_logprobs": True}
    body = CompletionRequest(**same, logit_bias={"3": 5, "4": -100}, stop_token_ids=[5, 6, 5], allowed_token_ids=[9, 8])
    own = {"logit_bias": ((3, 5.0), (4, -100.0)), "stop_token_ids": (5, 6), "allowed_token_ids": (9, 8)}
    scores = {"logprobs": 3, "prompt_logprobs": 4}
    assert params(body, **scores) == SamplingParams(max_tokens=10, **same, **own, **scores)


def test_the_models_defaults_fill_what_is_not_said():
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.2)
    filled = params(CompletionRequest(top_p=1.0), defaults)
    assert (filled.temperature, filled.top_p, filled.top_k) == (0.6, 1.0, 40)
    assert (filled.min_p, filled.repetition_penalty) == (0.05, 1.2)


@pytest.mark.parametrize(("given", "temperature"), [(0, 0.0), (1e-6, 0.0), (1e-5, 1e-5), (2, 2.0)])
def test_a_temperature_of_next_to_nothing_is_greedy(given, temperature):
    assert params(CompletionRequest(temperature=given)).temperature == temperature


@pytest.mark.parametrize(("given", "top_k"), [(-1, 0), (0, 0), (5, 5), (VOCAB - 1, VOCAB - 1), (VOCAB, 0), (10**30, 0)])
def test_a_top_k_that_leaves_everything_is_off(given, top_k):
    assert params(CompletionRequest(top_k=given)).top_k == top_k


@pytest.mark.parametrize("seed", [None, -1])
def test_no_seed(seed):
    assert params(CompletionRequest(seed=seed), choice=3).seed is None


@given(st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1), st.integers(0, 127))
def test_seeds_are_63_bits_and_differ_between_choices(seed, choice):
    first, other = params(CompletionRequest(seed=seed)), params(CompletionRequest(seed=seed), choice=choice)
    assert 0 <= other.seed < 2**63
    assert (other.seed == first.seed) == (choice == 0)


def test_a_biased_token_written_twice_counts_once():
    assert params(CompletionRequest(logit_bias={"3": 1, "03": 2})).logit_bias == ((3, 2.0),)


@pytest.mark.parametrize(("stop", "stops"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_strings(stop, stops):
    sampling = checked_sampling(CompletionRequest(stop=stop), GenerationDefaults(), vocab_size=VOCAB)
    assert sampling.stops == stops


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        (None, GenerationDefaults()),
        ({"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}, GenerationDefaults(temperature=0.6, top_p=0.9)),
        ({"temperature": None, "top_k": 50}, GenerationDefaults(top_k=50)),
        ({"do_sample": False, "temperature": 0.6}, GenerationDefaults(temperature=0.0)),
    ],
)
def test_defaults_of_a_folder(tmp_path, config, defaults):
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert GenerationDefaults.from_folder(tmp_path) == defaults


NO_DEFAULTS = {
    "temperature": ("hot", float("nan"), -5, True),
    "top_p": (7, 0),
    "top_k": ("x", -2, 2**70),
    "min_p": (2,),
    "repetition_penalty": (0,),
    "do_sample": ("yes",),
}


@pytest.mark.parametrize(("field", "value"), [(name, x) for name, values in NO_DEFAULTS.items() for x in values])
def test_defaults_that_no_request_could_have_are_refused_with_the_file(field, value, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ValueError, match=rf"generation_config\.json: {field}={value!r} is not "):
        GenerationDefaults.from_folder(tmp_path)


def test_all_wrong_defaults_are_named_at_once(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": NaN, "top_p": 7, "top_k": []}')
    with pytest.raises(ValueError, match=r"temperature=nan .*; top_p=7 .*; top_k=\[\] "):
        GenerationDefaults.from_folder(tmp_path)


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("asked", "given"), [(None, 5), (3, 3), (8, 5)])
def test_the_models_max_new_tokens_is_the_most_of_any_request(path, asked, given, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 5}')
    client = StubClient(DONE)
    state = state_of(client, generation_defaults=GenerationDefaults.from_folder(tmp_path))
    body = (CHAT if "chat" in path else {"prompt": "a"}) | ({} if asked is None else {"max_tokens": asked})
    assert call(state, "POST", path, json=body).status_code == 200
    assert client.submitted[0].sampling.max_tokens == given


@pytest.mark.parametrize(
    ("fields", "is_served"), [({"best_of": 1}, 1), ({"n": 2, "best_of": 2}, 1), ({"best_of": 2}, 0)]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_more_sequences_are_drawn_than_are_returned(path, fields, is_served):
    body = (CHAT if "chat" in path else {"prompt": "a"}) | {"max_tokens": 1} | fields
    answer = call(state_of(StubClient(DONE)), "POST", path, json=body)
    assert answer.status_code == (200 if is_served else 400)
    if not is_served:
        assert answer.json()["error"]["param"] == "best_of"
        assert "`n`" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 11}, "n"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS])
def test_what_a_beam_search_does_not_obey_is_refused(path, fields, param):
    own = {"prompt": "a"} if path == COMPLETIONS else CHAT
    answer = call(state_of(StubClient(DONE)), "POST", path, json=own | {"use_beam_search": True} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and param in (error["param"] or error["message"]), answer.text


def test_a_search_ends_with_its_time_and_needs_log_probabilities():
    client = StubClient(wire.Output("", [97], "length", logprobs=[wire.Logprobs.packed(-0.5, [97, 98], [-0.5, -1], 1)]))
    body = {"prompt": "a", "use_beam_search": True, "max_tokens": 30, "timeout_s": 1e-9, "temperature": 0.5}
    answer = call(state_of(client), "POST", COMPLETIONS, json=body)
    assert (answer.json()["choices"][0]["text"], answer.headers["x-ignored-fields"]) == ("", "temperature")
    answer = call(state_of(client), "POST", COMPLETIONS, json=body | {"timeout_s": 60})
    assert (answer.json()["choices"][0]["text"], len(client.submitted)) == ("a" * 30, 30)
    answer = call(state_of(client), "POST", COMPLETIONS, json={"prompt": "a", "length_penalty": 2})
    assert answer.headers["x-ignored-fields"] == "length_penalty"
    client.info = msgspec.structs.replace(client.info, logprobs_mode="raw_logits")
    answer = call(state_of(client), "POST", COMPLETIONS, json=body)
    assert "--logprobs-mode raw_logits tells no log-probabilities" in answer.json()["error"]["message"]
