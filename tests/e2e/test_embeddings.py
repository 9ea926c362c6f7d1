"""Embeddings of the demo behind a real server, next to chats: those of a dense pass over the same tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from model.config import LlamaConfig
from model.loading.source import resolve
from model.loading.weights import load_hf
from tests.e2e.conftest import serve
from tests.model.dense_attention import causal_attention

pytestmark = pytest.mark.e2e

TEXTS = ["Once upon a time", "What is 47 + 35?", "Lily and Tom went to the park. " * 12, "7"]


def dense_vectors(prompts: list[list[int]], pooling: str) -> np.ndarray:
    """f32[len(prompts), D], of length 1 each."""
    folder = resolve("demo").path
    config = LlamaConfig.from_file(folder)
    model = load_hf(folder, config, dtype=jnp.float32)
    found = []
    for ids in prompts:
        nothing = [None] * config.num_layers
        hidden, _ = model(jnp.array(ids, jnp.int32), jnp.arange(len(ids)), nothing, causal_attention())
        pooled = np.asarray(hidden[-1] if pooling == "last" else hidden.mean(axis=0), np.float64)
        found.append(pooled / np.linalg.norm(pooled))
    return np.array(found)


@pytest.mark.parametrize("flags", [["--task=embed"], ["--enable-embeddings", "--pooling-type=mean"]])
def test_embeddings_of_the_demo(server_flags, flags):
    with serve(*server_flags, *flags) as server, server.client() as client, ThreadPoolExecutor(8) as pool:

        def ask(_: int) -> str:
            question = [{"role": "user", "content": "What is 47 + 35?"}]
            answer = client.chat.completions.create(model="demo", messages=question, temperature=0)
            return answer.choices[0].message.content

        chats = [pool.submit(ask, i) for i in range(8)]
        answers = [pool.submit(client.embeddings.create, model="demo", input=TEXTS * 5) for _ in range(4)]
        with server.http() as http:
            prompts = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
        expected = np.tile(dense_vectors(prompts, "mean" if len(flags) > 1 else "last"), (5, 1))
        for answer in answers:
            found = np.array([entry.embedding for entry in answer.result().data])
            np.testing.assert_allclose(found, expected, atol=2e-5)
            assert answer.result().usage.prompt_tokens == 5 * sum(map(len, prompts))
        assert all("82" in chat.result() for chat in chats)
        metrics = server.wait_for_metrics(lambda m: m["num_requests_running"] == 0 and m["prompt_tokens_total"] > 0)
        assert metrics["num_compiles_after_warm_up_total"] == 0
