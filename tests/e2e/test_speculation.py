"""The demo served with drafts: the same texts as without, in fewer steps."""

from __future__ import annotations

import json
import os

import pytest

from model.eagle_config import EagleForm
from model.loading.source import DEMO_FOLDER
from tests.e2e.conftest import serve_exported
from tests.model.eagle_heads import random_for

pytestmark = pytest.mark.slow

# More drafts than these are right. The draft model has not learned JSON, and the head's weights are random.
# EAGLE's other form has another network only: tests/model/execution/test_drafts.py.
METHODS = {"ngram": 20, "draft_model": 0, "eagle3": None}
COUNT = '{"text": "47 + 35 = 82.", "answer": 82}\n' * 3
BODIES = [
    {"prompt": COUNT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_draft_counts": True},
    {"prompt": COUNT, "max_tokens": 40, "temperature": 0.3, "seed": 5, "logprobs": 2, "frequency_penalty": 0.1},
    {"prompt": COUNT, "max_tokens": 60, "temperature": 0, "stop": ["82", "5"]},
    {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 1, "seed": 9, "return_token_ids": True},
]


@pytest.mark.e2e
@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_of_a_server_without_drafts(server, method, tmp_path):
    """One row, so that there are few programs to compile. The draft model is the demo's own, in int8."""
    config = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["quantization"] = "int8"
    if method in set(EagleForm):
        config["model"] = str(random_for(tmp_path, EagleForm(method), DEMO_FOLDER))
    flags = ["--max-num-seqs=1", "--max-num-batched-tokens=16", "--max-model-len=512"]
    cache = ["--compile-cache", os.environ["JAX_COMPILATION_CACHE_DIR"]]
    drafts = ["--speculative-config", json.dumps(config)]
    with serve_exported(*flags, *cache, *drafts) as drafting:
        with server.http() as plain, drafting.http() as http:
            for body in BODIES:
                expected, found = (
                    client.post("/v1/completions", json={"model": "demo", **body}).json() for client in (plain, http)
                )
                (expected_choice,), (choice,) = expected["choices"], found["choices"]
                assert choice["text"] == expected_choice["text"]
                assert choice["finish_reason"] == expected_choice["finish_reason"]
                assert choice.get("token_ids") == expected_choice.get("token_ids")
                assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
                if "return_draft_counts" in body:
                    counts = found["usage"]["completion_tokens_details"]
                    assert sum(counts.values()) > 0
                    assert counts["accepted_prediction_tokens"] < found["usage"]["completion_tokens"]
        least = METHODS[method]
        drafting.wait_for_metrics(
            lambda metrics: (
                metrics["spec_decode_num_draft_tokens_total"] > 0
                if least is None
                else metrics["spec_decode_num_accepted_tokens_total"] > least
            )
        )
        metrics = drafting.metrics()
        assert metrics["num_compiles_after_warm_up_total"] == metrics["integrity_failures_total"] == 0
        assert metrics["spec_decode_num_draft_tokens_total"] >= metrics["spec_decode_num_accepted_tokens_total"]
