"""The demo served through the interpreted TPU kernels, by the whole server, says what it says through the reference.

Over int8 pages here; the GPU kernels' test has pages of bfloat16. Each form takes the interpreters a minute.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from model.loading.source import DEMO_FOLDER
from scripts.llm import LLM
from tests.e2e.conftest import serve
from tests.model.checkpoints import write_tensors

PROMPTS = ["Once upon a time, there was a", "The"]
# Few and small programs: every step of the interpreter costs seconds.
LIMITS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 32, "num_pages": 6}
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture
def two_layers(tmp_path: Path) -> Path:
    """The first two layers of the demo. The programs have the kernels once for each layer; of two, one has the pages
    behind the other's."""
    folder = tmp_path / "demo"
    shutil.copytree(DEMO_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(DEMO_FOLDER / "model.safetensors")
    write_tensors(folder, {name: x for name, x in tensors.items() if not re.search(r"\.layers\.[2-9]", name)})
    return folder


@pytest.mark.slow
@pytest.mark.e2e
def test_same_greedy_text_as_the_reference(two_layers: Path) -> None:
    options = {"dtype": "float32", "kv_cache_dtype": "int8", "compile_cache": "none", **LIMITS}
    with LLM(model=str(two_layers), attention_backend="reference", **options) as llm:
        expected = [result.outputs[0].text for result in llm.generate(PROMPTS, GREEDY)]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags += ["--model", str(two_layers), "--served-model-name", "demo", "--attention-backend", "tpu-interpret"]
    with serve(*flags) as server, server.http() as http:
        answer = http.post("/v1/completions", json={"model": "demo", "prompt": PROMPTS, **GREEDY}, timeout=600).json()
    assert [choice["text"] for choice in answer["choices"]] == expected
