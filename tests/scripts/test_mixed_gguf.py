"""A GGUF file with projections of several types is served with the weights of the file."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from model.loading.source import DEMO_FOLDER, resolve
from model.loading.weights import load_hf
from scripts.llm import LLM
from tests.c_compiler import compiler
from tests.conftest import COMPILED
from tests.model.dense_attention import dense_logits
from tests.model.loading.test_exact_four_bits import as_llama_quantize, write_gguf

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64, "num_pages": 16}
VOCAB_SIZE = 1536  # of the demo's tokenizer
PROMPT = [1520, *range(5, 45, 2)]


def test_its_log_probabilities_are_those_of_the_files_weights(tmp_path):
    """In the first layer the values alone have 6 bits, in the second one a whole projection has. The inputs of products
    are rounded to int8: hence the bound."""
    compiler()
    path, report = write_gguf(tmp_path, as_llama_quantize, DEMO_FOLDER, vocab_size=VOCAB_SIZE), []
    with LLM(str(path), device="cpu", compile_cache=str(COMPILED), report=report.append, **LIMITS) as llm:
        asked = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0}
        (answer,) = llm.generate({"prompt_token_ids": PROMPT}, asked)
    (said,) = (line for line in report if "GGUF Q4_K and Q6_K checkpoint, kept" in line)
    assert "(2 in int6, groups of 16 as in Q6_K), and the head is int6, groups of 16 as in Q6_K" in said
    source = resolve(str(path))
    exact = dense_logits(load_hf(source.path, source.config, dtype=jnp.float32), np.array(PROMPT))
    scores = np.asarray(jax.nn.log_softmax(exact, axis=-1))
    expected = [scores[place, token] for place, token in enumerate(PROMPT[1:])]
    found = [entry[token].logprob for entry, token in zip(answer.prompt_logprobs[1:], PROMPT[1:], strict=True)]
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(exact).max())
