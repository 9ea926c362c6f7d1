"""The demo model served through the interpreted GPU kernels says what it says through the reference.

In bfloat16, which the kernels take: the two backends round differently, so that a near tie between two tokens may fall
either way. The questions are ones that the model is sure about. The self-test has tests of its own.
"""

from __future__ import annotations

import pytest

from scripts.llm import LLM

QUESTIONS = ["What is 47 + 35?", "What is 12 + 9?"]
# Few and small programs: every step of the interpreter costs seconds.
LIMITS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 16, "num_pages": 12}
ENGINE = {"model": "demo", "device": "cpu", "dtype": "bfloat16", "compile_cache": "none", "self_test": "never"} | LIMITS


def greedy(attention_backend: str) -> list[tuple[str, tuple[int, ...]]]:
    with LLM(attention_backend=attention_backend, **ENGINE) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        results = llm.chat(chats, {"temperature": 0, "max_tokens": 10})
    return [(result.outputs[0].text, result.outputs[0].token_ids) for result in results]


@pytest.mark.slow
@pytest.mark.e2e
def test_same_greedy_text_as_the_reference() -> None:
    interpreted = greedy("gpu-interpret")
    assert interpreted == greedy("reference")
    assert interpreted[0][0].startswith("47 + 35 = 82")
