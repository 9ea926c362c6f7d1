"""`--logprobs-mode` with the demo: what an answer says of the tokens that it has."""

from __future__ import annotations

import os

import pytest

from batcher.request import LogprobsMode
from scripts.llm import LLM
from scripts.offline.arguments import SamplingParams

pytestmark = pytest.mark.e2e

# The token is certain. Its own log-probability stays what the model gives it.
ONE = SamplingParams(temperature=0.7, top_k=1, max_tokens=6, logprobs=2, ignore_eos=True, seed=1)


def told(**settings) -> tuple[list[int], list[float]]:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 128, "num_pages": 32}
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    with LLM(model="demo", compile_cache=cache, **limits, **settings) as llm:
        (result,) = llm.generate("one two one two one", ONE)
    return result.token_ids, result.outputs[0].logprobs["token_logprobs"]


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 2}], ids=["alone", "drafts"])
def test_processed_logprobs_are_of_the_distribution_that_was_drawn_from(drafts):
    tokens, raw = told(speculative_config=drafts)
    assert max(raw) < 0
    assert told(speculative_config=drafts, logprobs_mode=LogprobsMode.PROCESSED_LOGPROBS) == (tokens, [0.0] * 6)
    same, logits = told(speculative_config=drafts, logprobs_mode="raw_logits")
    assert same == tokens and min(logits) > max(raw)
