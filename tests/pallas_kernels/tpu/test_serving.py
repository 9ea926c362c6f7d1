"""The demo model served through the interpreted TPU kernels says what it says through the reference."""

from __future__ import annotations

import pytest

from scripts.llm import LLM

PROMPTS = ["Once upon a time, there was a", "The"]
# Few and small programs: every step of the interpreter costs seconds.
LIMITS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 16, "num_pages": 12}


def greedy(attention_backend: str) -> list[tuple[int, ...]]:
    with LLM(model="demo", attention_backend=attention_backend, dtype="float32", compile_cache="none", **LIMITS) as llm:
        results = llm.generate(PROMPTS, {"temperature": 0, "max_tokens": 6})
    return [result.token_ids for result in results]


@pytest.mark.slow
@pytest.mark.e2e
def test_same_greedy_tokens_as_the_reference() -> None:
    assert greedy("tpu-interpret") == greedy("reference")
