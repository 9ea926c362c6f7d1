from __future__ import annotations

import pytest

from server.api.request.limits import limit_scores
from server.engine import wire
from server.http.request_error import RequestError
from server.settings import DEFAULT_MAX_REQUEST_LOGPROBS
from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, state_of

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "a"}]}  # 24 tokens of a context of 64


def submitted(path: str, body: dict, *, num_prompt: int = 24, **settings) -> list:
    score = wire.Logprobs.packed(-1.0, [], [])
    client = StubClient(wire.Output("", [97], "length", logprobs=[score], prompt_logprobs=[score] * (num_prompt - 1)))
    response = call(state_of(client, **settings), "POST", path, json=body)
    assert response.status_code == 200, response.text
    return [request.sampling for request in client.submitted]


def refusal(path: str, body: dict, **settings) -> dict:
    response = call(state_of(StubClient(DONE), **settings), "POST", path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_one_choice_that_fills_the_longest_context_is_within_the_default():
    most = {"n": 1, "logprobs": 20, "fixed": False, "most": DEFAULT_MAX_REQUEST_LOGPROBS}
    assert limit_scores([131_071], num_prompt_scores=21, **most) == [131_071]
    assert limit_scores([1], num_prompt_scores=131_071 * 21, **most) == [1]


@pytest.mark.parametrize(
    ("limits", "logprobs", "fixed", "lowered"),
    [
        ([50, 60], None, True, [50, 60]),
        ([5, 5], 4, True, [5, 5]),  # 2 x 10 x 5 = 100
        ([50, 3], 4, False, [5, 3]),
        ([5, 6], 4, True, None),
        ([50] * 11, 4, False, None),
    ],
)
def test_what_fits_into_a_hundred_scores(limits, logprobs, fixed, lowered):
    options = {"n": 2, "logprobs": logprobs, "num_prompt_scores": 0, "fixed": fixed, "most": 100}
    if lowered is not None:
        assert limit_scores(limits, **options) == lowered
        return
    with pytest.raises(RequestError, match="--max-request-logprobs"):
        limit_scores(limits, **options)


def test_a_chat_without_max_tokens_ends_where_the_limit_is():
    body = HELLO | {"logprobs": True, "top_logprobs": 4, "n": 2}
    assert [sampling.max_tokens for sampling in submitted(CHAT, body, max_request_logprobs=200)] == [20, 20]
    assert [sampling.max_tokens for sampling in submitted(CHAT, body)] == [40, 40]


def test_more_than_the_limit_is_refused_with_the_fields_and_the_flag():
    body = HELLO | {"logprobs": True, "top_logprobs": 4, "n": 2, "max_tokens": 21}
    error = refusal(CHAT, body, max_request_logprobs=200)
    assert error["param"] == "logprobs"
    for word in ("210 log-probabilities", "max_tokens", "n,", "top_logprobs", "allows 200", "--max-request-logprobs"):
        assert word in error["message"]
    assert submitted(CHAT, body | {"logprobs": False, "top_logprobs": None}, max_request_logprobs=200)


def test_sampled_logprobs_count_one_for_each_token():
    body = HELLO | {"sampled_logprobs": True, "n": 2}
    assert [sampling.max_tokens for sampling in submitted(CHAT, body, max_request_logprobs=60)] == [30, 30]
    assert refusal(CHAT, body | {"max_tokens": 31}, max_request_logprobs=60)["param"] == "sampled_logprobs"
    body |= {"logprobs": True, "top_logprobs": 4}
    assert [sampling.max_tokens for sampling in submitted(CHAT, body, max_request_logprobs=240)] == [20, 20]


def test_scores_of_prompts_count_as_often_as_they_are_shown():
    body = {"prompt": [65] * 10, "prompt_logprobs": 4, "max_tokens": 1}
    submitted(COMPLETIONS, body | {"n": 2}, num_prompt=10, max_request_logprobs=100)
    assert refusal(COMPLETIONS, body | {"n": 3}, max_request_logprobs=100)["param"] == "prompt_logprobs"
    submitted(CHAT, HELLO | {"prompt_logprobs": 4, "n": 3}, max_request_logprobs=120)  # shown once
    echo = {"prompt": [65] * 10, "logprobs": 4, "echo": True, "max_tokens": 0, "n": 2}
    assert refusal(COMPLETIONS, echo, max_request_logprobs=109)["param"] == "logprobs"
    submitted(COMPLETIONS, echo, num_prompt=10, max_request_logprobs=110)
