"""/score, /rerank and /pooling with the real engine over the numpy runner: cosines of the vectors of /v1/embeddings."""

from __future__ import annotations

import numpy as np
import pytest

from batcher.request import Pooling
from tests.server.support.real_engine import RealConfig
from tests.server.support.running import RunningServer, server_of
from tests.server.support.stub_app import StubClient, call, state_of

TARGET = "tests.server.support.real_engine:build"
TEXTS = ["hello", "hallo", "something else", "hello"]
PATHS = ["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/pooling"]


server = server_of(RealConfig(pooling=Pooling.LAST), target=TARGET, max_embedding_inputs=4)


def post(server: RunningServer, path: str, **body):
    return server.post(path, body)


def vectors(server: RunningServer, texts: list[str]) -> np.ndarray:
    answer = post(server, "/v1/embeddings", input=texts).json()
    return np.array([item["embedding"] for item in answer["data"]])


def test_pooling_gives_the_vectors_of_embeddings(server):
    answer = post(server, "/pooling", input=TEXTS).json()
    assert {item["object"] for item in answer["data"]} == {"pooling"}
    np.testing.assert_allclose([item["data"] for item in answer["data"]], vectors(server, TEXTS), atol=1e-6)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_cosines(server, path):
    query, *others = vectors(server, TEXTS)
    answer = post(server, path, text_1=TEXTS[0], text_2=TEXTS[1:]).json()
    found = [item["score"] for item in answer["data"]]
    np.testing.assert_allclose(found, np.array(others) @ query, atol=1e-5)
    assert found[-1] == pytest.approx(1, abs=1e-5)
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    newer = post(server, path, queries=TEXTS[:2], documents=TEXTS[2:]).json()
    pairs = np.array([vectors(server, TEXTS)[i] @ vectors(server, TEXTS)[i + 2] for i in range(2)])
    np.testing.assert_allclose([item["score"] for item in newer["data"]], pairs, atol=1e-5)
    assert newer["usage"]["prompt_tokens"] == sum(len(text) + 1 for text in TEXTS)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_their_score(server, path):
    query, *others = vectors(server, TEXTS)
    scores = np.array(others) @ query
    results = post(server, path, query=TEXTS[0], documents=[TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]).json()["results"]
    assert results[0]["index"] == 2
    assert [result["document"]["text"] for result in results] == [TEXTS[1 + result["index"]] for result in results]
    np.testing.assert_allclose([result["relevance_score"] for result in results], sorted(scores)[::-1], atol=1e-5)
    best = post(server, path, query=TEXTS[0], documents=TEXTS[1:], top_n=1, return_documents=False).json()["results"]
    assert [(result["index"], "document" in result) for result in best] == [(2, False)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 5}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "instruction"),
        ("/pooling", {"input": "a", "dimensions": 3}, "dimensions"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(server, path, body, param):
    answer = post(server, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_without_embeddings_says_so(path):
    answer = call(state_of(StubClient()), "POST", path, json={})
    assert answer.status_code == 404
    assert "--enable-embeddings" in answer.json()["error"]["message"]
