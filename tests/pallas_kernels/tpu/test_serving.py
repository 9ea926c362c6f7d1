"""The demo served through the interpreted TPU kernels, by the whole server, says what it says through the reference.

Over int8 pages here; the GPU kernels' test has pages of bfloat16. Each form takes the interpreters a minute.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.llm import LLM
from tests.demo.one_layer import first_layers
from tests.e2e.conftest import serve

PROMPTS = ["Once upon a time, there was a", "The"]
# Few and small programs: every step of the interpreter costs seconds.
LIMITS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 32, "num_pages": 6}
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.mark.slow
@pytest.mark.e2e
def test_same_greedy_text_as_the_reference(tmp_path: Path) -> None:
    """Without the self-test, which has tests of its own."""
    model = str(first_layers(tmp_path / "demo", 2))
    options = {"dtype": "float32", "kv_cache_dtype": "int8", "compile_cache": "none", "self_test": "never", **LIMITS}
    with LLM(model=model, attention_backend="reference", **options) as llm:
        expected = [result.outputs[0].text for result in llm.generate(PROMPTS, GREEDY)]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags += ["--model", model, "--served-model-name", "demo", "--attention-backend", "tpu-interpret"]
    with serve(*flags) as server, server.http() as http:
        answer = http.post("/v1/completions", json={"model": "demo", "prompt": PROMPTS, **GREEDY}, timeout=600).json()
    assert [choice["text"] for choice in answer["choices"]] == expected
