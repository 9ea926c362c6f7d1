"""Embeddings of the demo behind a real server, next to chats: those of a dense pass over the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from model.config import LlamaConfig
from model.loading.source import resolve
from model.loading.weights import load_hf
from tests.e2e.clients import imported, imported_litellm
from tests.e2e.conftest import DemoServer, serve_exported
from tests.model.dense_attention import dense_hidden

pytestmark = pytest.mark.e2e

TEXTS = ["Once upon a time", "What is 47 + 35?", "Lily and Tom went to the park. " * 12, "7"]


def dense_vectors(prompts: list[list[int]]) -> np.ndarray:
    """f32[len(prompts), D]: the means of the tokens' hidden states, of length 1 each."""
    folder = resolve("demo").path
    config = LlamaConfig.from_file(folder)
    model = load_hf(folder, config, dtype=jnp.float32)
    found = []
    for ids in prompts:
        hidden = np.asarray(dense_hidden(model, np.array(ids, np.int32)))
        pooled = hidden.mean(axis=0).astype(np.float64)
        found.append(pooled / np.linalg.norm(pooled))
    return np.array(found)


FEW_SHAPES = ["--max-num-seqs=4", "--max-num-batched-tokens=32"]


@pytest.fixture(scope="module")
def embedder(engine_flags) -> Iterator[DemoServer]:
    with serve_exported(*engine_flags, *FEW_SHAPES, "--task=embed", "--pooling-type=mean") as server:
        yield server


def test_embeddings_of_the_demo(embedder):
    with embedder.client() as client, ThreadPoolExecutor(8) as pool:

        def ask(_: int) -> str:
            question = [{"role": "user", "content": "What is 47 + 35?"}]
            answer = client.chat.completions.create(model="demo", messages=question, temperature=0)
            return answer.choices[0].message.content

        chats = [pool.submit(ask, i) for i in range(8)]
        answers = [pool.submit(client.embeddings.create, model="demo", input=TEXTS * 2) for _ in range(4)]
        with embedder.http() as http:
            prompts = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
        expected = np.tile(dense_vectors(prompts), (2, 1))
        for answer in answers:
            found = np.array([entry.embedding for entry in answer.result().data])
            np.testing.assert_allclose(found, expected, atol=2e-5)
            assert answer.result().usage.prompt_tokens == 2 * sum(map(len, prompts))
        assert all("82" in chat.result() for chat in chats)
        metrics = embedder.wait_for_metrics(lambda m: m["num_requests_running"] == 0 and m["prompt_tokens_total"] > 0)
        assert metrics["num_compiles_after_warm_up_total"] == 0


@pytest.mark.clients
def test_other_clients_get_the_same_vectors(embedder):
    litellm = imported_litellm()
    langchain_openai = imported("langchain_openai", package="langchain-openai")
    with embedder.client() as client:
        expected = [entry.embedding for entry in client.embeddings.create(model="demo", input=TEXTS).data]
    url = f"{embedder.url}/v1"
    # With a check of the length it sends ids of OpenAI's tokenizer, as it does for every model.
    langchain = langchain_openai.OpenAIEmbeddings(
        model="demo", base_url=url, api_key="none", check_embedding_ctx_length=False
    )
    np.testing.assert_allclose(langchain.embed_documents(TEXTS), expected, atol=2e-5)
    np.testing.assert_allclose(langchain.embed_query(TEXTS[0]), expected[0], atol=2e-5)
    langchain.client._client.close()
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.embedding(model=f"{provider}/demo", input=TEXTS, api_base=url, api_key="none")
        np.testing.assert_allclose([entry["embedding"] for entry in answer.data], expected, atol=2e-5)
