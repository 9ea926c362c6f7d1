"""`--logprobs-mode` with the demo's first layer: what an answer says of the tokens that it has."""

from __future__ import annotations

import os
from dataclasses import replace
from operator import sub

import pytest

from batcher.request import LogprobsMode
from scripts.llm import LLM
from scripts.offline.arguments import SamplingParams
from scripts.offline.results import CompletionOutput
from tests.demo.one_layer import one_layer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# The token is certain. Its own log-probability stays what the model gives it.
ONE = SamplingParams(temperature=0.7, top_k=1, max_tokens=6, logprobs=2, sampled_logprobs=True, ignore_eos=True, seed=1)
SEVERAL = replace(ONE, temperature=1.5, top_k=0, top_p=0.9, presence_penalty=0.5)


def told(model: str, **settings) -> list[CompletionOutput]:
    """Of `ONE` and of `SEVERAL`."""
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 128, "num_pages": 32}
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    with LLM(model=model, compile_cache=cache, **limits, **settings) as llm:
        return [result.outputs[0] for result in llm.generate(["one two one two one"] * 2, [ONE, SEVERAL])]


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 2}], ids=["alone", "drafts"])
def test_processed_logprobs_are_of_the_distribution_that_was_drawn_from(drafts, tmp_path):
    model = str(one_layer(tmp_path / "model"))
    raw, processed, logits = (
        told(model, speculative_config=drafts, logprobs_mode=mode)
        for mode in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.RAW_LOGITS)
    )
    for first, *others in zip(raw, processed, logits, strict=True):
        assert [other.token_ids for other in others] == [first.token_ids] * 2
        assert [other.sampled_logprobs for other in others] == [first.sampled_logprobs] * 2
        assert of_tokens(others[0]) == pytest.approx(list(first.sampled_logprobs), abs=1e-5)
    assert of_tokens(processed[0]) == [0.0] * 6
    assert max(of_tokens(raw[0])) < 0
    assert min(of_tokens(logits[0])) > max(of_tokens(raw[0]))
    assert min(raw[1].sampled_logprobs) < -0.1
    assert max(map(abs, map(sub, of_tokens(raw[1]), raw[1].sampled_logprobs))) > 0.01


def of_tokens(output: CompletionOutput) -> list[float]:
    return [found[token].logprob for token, found in zip(output.token_ids, output.logprobs, strict=True)]
