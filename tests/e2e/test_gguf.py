"""The demo as a GGUF file, served over a socket, answers as the demo's folder does."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER
from scripts.llm import LLM
from tests.e2e.conftest import serve
from tests.model import gguf_files
from tests.model.gguf_files import Type

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
QUESTIONS = ["What is 47 + 35?", "Which is larger, 31 or 57?", "Count from 4 to 9."]
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def exact() -> list[str]:
    with LLM(model="demo", device="cpu", compile_cache="none", **LIMITS) as llm:
        return [result.text for result in llm.chat([[message(text)] for text in QUESTIONS], GREEDY)]


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("type", [Type.BF16, Type.Q8_0])
def test_the_server_answers_as_from_safetensors(tmp_path, server_flags, exact, type):
    config, tensors = LlamaConfig.from_file(DEMO_FOLDER), load_file(DEMO_FOLDER / "model.safetensors")
    path = gguf_files.write(tmp_path / "demo.gguf", config, tensors, type, tokenizer=DEMO_FOLDER)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    with serve("--model", str(path), *server_flags, *flags) as server:
        assert ("GGUF Q8_0 checkpoint: requantised to int8 per row" in "".join(server.lines)) == (type is Type.Q8_0)
        client = server.client()
        assert [model.id for model in client.models.list()] == [str(path)]
        for text, wanted in zip(QUESTIONS, exact, strict=True):
            answer = client.chat.completions.create(model=str(path), messages=[message(text)], **GREEDY)
            assert answer.choices[0].message.content == wanted
            assert answer.choices[0].finish_reason == "stop"
