"""The demo over int8 pages, or with weights and inputs in int8, by the whole engine.

No text depends on company, chunks or cached prefixes.
"""

from __future__ import annotations

import os

import pytest

from scripts.llm import LLM

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
QUESTIONS = [
    [SYSTEM, {"role": "user", "content": f"What is {a} + {b}?"}] for a, b in ((47, 35), (12, 81), (33, 44), (5, 19))
]
STORIES = ["Once upon a time, there was a", "The little dog"]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def texts(*, alone: bool, **settings) -> list[str]:
    """Of all prompts twice. Chats share their first page, the system's message."""
    # Five pages, as few as a context of 80 tokens may have.
    limits = {"max_model_len": 80, "max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 16, "num_pages": 5}
    folder = os.environ["JAX_COMPILATION_CACHE_DIR"]
    with LLM(model="demo", compile_cache=folder, **limits, **settings) as llm:
        found = []
        for _ in range(2):
            groups = [[q] for q in QUESTIONS] if alone else [QUESTIONS]
            found += [result.text for group in groups for result in llm.chat(group, GREEDY)]
            found += [result.text for result in llm.generate(STORIES, GREEDY)]
        stats = llm.stats()
        assert stats.num_pages_used == 0
        assert (stats.prefix_cache_hits > 0) is not alone
    return found


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("narrow", ["kv_cache_dtype", "quantization"])
def test_texts_are_the_same_in_any_company_and_however_they_are_computed(narrow):
    form = {narrow: "int8"}
    expected = texts(**form, alone=True, enable_prefix_caching=False)
    assert "82" in expected[0] and "93" in expected[1] and "77" in expected[2] and "24" in expected[3]
    assert expected[:6] == expected[6:]
    assert texts(**form, alone=False, long_prefill_token_threshold=5) == expected
