"""/v1/embeddings with the real engine over the numpy runner: vectors are those that the runner's contract foretells."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest

from batcher.request import Pooling, Request, SamplingParams
from tests.batcher.fake_runner import FAKE_HIDDEN, expected_embedding
from tests.server.support.real_engine import CAPACITY, RealConfig
from tests.server.support.requests import load, reading, wait_until, wait_until_idle
from tests.server.support.running import running_server, server_of
from tests.server.support.stub_app import StubClient, call, state_of
from tests.server.support.tokenizers import BOS, EOT

TARGET = "tests.server.support.real_engine:build"
PATH = "/v1/embeddings"


server = server_of(RealConfig(pooling=Pooling.LAST), target=TARGET, max_embedding_inputs=300)


def foretold(prompt: str | Sequence[int]) -> np.ndarray:
    ids = (BOS, *prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
    request = Request(request_id="", prompt=ids, sampling=SamplingParams(max_tokens=1), embeds=True)
    return expected_embedding(request, Pooling.LAST)


def vectors(answer: openai.types.CreateEmbeddingResponse) -> list[list[float]]:
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return [entry.embedding for entry in answer.data]


def test_invocations_embed_an_input(server):
    answer = server.post("/invocations", {"input": "hello"}).json()
    assert answer["data"][0]["embedding"] == pytest.approx(foretold("hello"), abs=1e-6)


@pytest.mark.parametrize(
    "given",
    ["hello", ["hello", "a longer text, " * 20, "hello"], [104, 105], [[104, 105], [9], list(range(200))]],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_the_official_client_gets_vectors_in_both_forms(server, given):
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    with server.client() as client:
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):  # {}: base64, decoded
            answer = client.embeddings.create(model="test-model", input=given, **options)
            found = vectors(answer)
            if options.get("encoding_format") == "base64":
                found = [np.frombuffer(base64.b64decode(text), "<f4") for text in found]
            np.testing.assert_allclose(found, [foretold(prompt) for prompt in several], atol=1e-6)
            count = sum(len(p) + isinstance(p, str) for p in several)
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
            assert (answer.model, answer.object, answer.data[0].object) == ("test-model", "list", "embedding")


def test_the_answer_has_openais_fields(server):
    answer = server.post(PATH, {"model": "alias", "input": ["a", "b"], "user": "me"}).json()
    assert answer.keys() == {"object", "data", "model", "usage"}
    assert all(entry.keys() == {"object", "index", "embedding"} for entry in answer["data"])
    assert all(len(entry["embedding"]) == FAKE_HIDDEN for entry in answer["data"])


def test_many_inputs_come_back_in_their_order(server):
    texts = [f"{i} " * (1 + i % 40) for i in range(300)]
    with server.client() as client, ThreadPoolExecutor() as pool:
        several = list(pool.map(lambda _: client.embeddings.create(model="test-model", input=texts), range(3)))
    expected = np.array([foretold(text) for text in texts])
    for answer in several:
        np.testing.assert_allclose(vectors(answer), expected, atol=1e-6)
    assert reading(server, "num_compiles_after_warm_up_total") == 0


def test_embeddings_and_texts_share_the_engine(server):
    def text(client: openai.OpenAI, i: int) -> str:
        body = {"model": "test-model", "prompt": f"prompt {i % 4}", "max_tokens": 20, "temperature": 0}
        return client.completions.create(**body).choices[0].text

    with server.client() as client, ThreadPoolExecutor(8) as pool:
        alone = [text(client, i) for i in range(4)]
        mixed = [pool.submit(text, client, i) for i in range(12)]
        embed = client.embeddings.create
        embedded = [pool.submit(embed, model="test-model", input=[f"text {i}"] * 5) for i in range(12)]
        assert [future.result() for future in mixed] == alone * 3
        for i, future in enumerate(embedded):
            np.testing.assert_allclose(vectors(future.result()), [foretold(f"text {i}")] * 5, atol=1e-6)


def test_a_prefix_in_the_cache_changes_nothing(server):
    text = "a prefix that fills several pages of the cache. " * 4
    with server.client() as client:
        for _ in range(2):
            answer = client.embeddings.create(model="test-model", input=text)
            np.testing.assert_allclose(vectors(answer), [foretold(text)], atol=1e-6)
    num_cached = answer.usage.model_extra["prompt_tokens_details"]["cached_tokens"]
    assert num_cached > 0


def test_an_input_may_fill_the_context(server):
    ids = [BOS, *(32 + i % 90 for i in range(CAPACITY.max_model_len - 1))]
    with server.client() as client:
        for given in (ids, bytes(ids[1:]).decode()):
            answer = client.embeddings.create(model="test-model", input=[given])
            assert answer.usage.prompt_tokens == len(ids)
            np.testing.assert_allclose(vectors(answer)[0], foretold(given), atol=1e-6)
        cut = client.embeddings.create(model="test-model", input=[[*ids, 5]], extra_body={"truncate_prompt_tokens": -1})
    np.testing.assert_allclose(vectors(cut), [foretold(ids)], atol=1e-6)


def test_truncation_keeps_the_beginning_and_affixes_are_optional(server):
    with server.http() as http:
        cases = [
            ({"input": "hello", "truncate_prompt_tokens": 3}, (BOS, *b"he")),
            ({"input": list(range(10, 20)), "truncate_prompt_tokens": 4}, range(10, 14)),
            ({"input": list(range(10, 20)), "truncate_prompt_tokens": 4, "truncation_side": "left"}, range(16, 20)),
            ({"input": "x" * 600, "truncate_prompt_tokens": -1}, (BOS, *b"x" * (CAPACITY.max_model_len - 1))),
            ({"input": "hello", "add_special_tokens": False}, tuple(b"hello")),
            ({"input": "a<|eot_id|>"}, (BOS, *b"a<|eot_id|>")),  # what looks like a special token is text
            ({"input": [97, EOT]}, (97, EOT)),
        ]
        for body, ids in cases:
            answer = http.post(PATH, json=body).json()
            np.testing.assert_allclose(answer["data"][0]["embedding"], foretold(ids), atol=1e-6)
            assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": None}, "input: is missing"),
        ({"input": []}, "input: must not be an empty list"),
        ({"input": ["a", ""], "add_special_tokens": False}, "input: input number 1 is empty"),
        ({"input": [[5], []]}, "input: input number 1 is empty"),
        ({"input": ["a", [5]]}, "input: must be a text, a list of texts"),
        ({"input": [5, 10**6]}, "input: token id 1000000 is out of vocabulary"),
        ({"input": [[5], [-1]]}, "input: token id -1 is out of vocabulary"),
        ({"input": [7] * 513}, "embeds at most 512 tokens at once, and input number 0 has 513"),
        ({"input": ["ok", "x" * 512]}, "input number 1 has 513"),
        ({"input": ["a"] * 301}, "input: at most 300 inputs per request are allowed, got 301"),
        ({"input": "a", "dimensions": 2}, f"dimensions: this model's vectors have {FAKE_HIDDEN} numbers"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format: Invalid enum value 'int8'"),
        ({"input": "a", "normalize": False}, "normalize: vectors always have the length 1"),
        ({"input": "a", "use_activation": False}, "use_activation: vectors always have the length 1"),
        ({"input": "a", "endianness": "big"}, "endianness: vectors are float32"),
        ({"input": "a", "messages": [{}]}, "messages: this route has `input` for it"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens: must be at least 1"),
        ({"input": "a", "priority": 2**40}, "priority: Expected `int` <= 2147483648"),
        ({"input": "a", "timeout_s": 0}, "timeout_s: must be above 0"),
    ],
)
def test_what_cannot_be_had_is_refused_in_words(server, fields, words):
    answer = server.post(PATH, fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_dimensions_may_be_the_models_own(server):
    with server.client() as client:
        answer = client.embeddings.create(model="test-model", input="a", dimensions=FAKE_HIDDEN)
    assert len(vectors(answer)[0]) == FAKE_HIDDEN


def test_one_bad_input_fails_all_and_leaves_nothing_behind(tmp_path):
    config = RealConfig(pooling=Pooling.LAST, nan_token=ord("~"))
    with running_server(tmp_path, TARGET, config) as server, server.http() as http:
        answer = http.post(PATH, json={"input": ["fine"] * 100 + ["~"] + ["fine"] * 100})
        assert answer.status_code == 500
        assert "not a finite number" in answer.json()["error"]["message"]
        assert len(http.post(PATH, json={"input": ["fine"] * 10}).json()["data"]) == 10
        wait_until_idle(server)


def test_a_server_without_embeddings_says_how_to_get_them(echo):
    with echo.client() as client, pytest.raises(openai.NotFoundError, match="--enable-embeddings"):
        client.embeddings.create(model="test-model", input="a")


@pytest.mark.parametrize("how", ["the client goes away", "the time is over"])
def test_a_request_that_is_given_up_is_aborted(tmp_path, how):
    """The engine's first step waits until it hears of an abort."""
    with running_server(tmp_path, TARGET, RealConfig(pooling=Pooling.LAST, held_at=0)) as server, server.http() as http:
        if how == "the time is over":
            answer = http.post(PATH, json={"input": ["a"] * 100, "timeout_s": 0.2})
            assert answer.status_code == 503  # of those that run, or of those that wait
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(PATH, json={"input": ["a"] * 100}, timeout=0.5)
        assert len(http.post(PATH, json={"input": ["b"] * 10}).json()["data"]) == 10
        wait_until_idle(server)


def test_an_administrator_ends_them(tmp_path):
    """The engine's first step waits until it hears of an abort."""
    config = RealConfig(pooling=Pooling.LAST, held_at=0)
    with running_server(tmp_path, TARGET, config, admin_api_keys=("boss",)) as server, server.http() as http:
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(http.post, PATH, json={"input": ["a"] * 100})
            wait_until(lambda: load(server) == 1)
            boss = {"Authorization": "Bearer boss"}
            wait_until(lambda: http.post("/abort_requests", json={}, headers=boss).json()["aborted"])
        assert answer.result().status_code == 503
        assert "administrator" in answer.result().json()["error"]["message"]


def test_a_dead_engine_is_said_at_once():
    client = StubClient()
    client.info = type(client.info)(max_model_len=64, vocab_size=300, embedding_size=4)
    client.death = "the device has gone"
    answer = call(state_of(client), "POST", PATH, json={"input": "a"})
    assert answer.status_code == 503
    assert "the device has gone" in answer.json()["error"]["message"]
