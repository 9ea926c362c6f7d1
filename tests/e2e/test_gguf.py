"""The demo as a GGUF file, served over a socket, answers as the demo's folder does."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER
from tests.e2e.conftest import DemoServer, serve_exported
from tests.model import gguf_files
from tests.model.gguf_files import Type

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# The programs of int8 weights are compiled for this test alone.
FEW_SHAPES = ["--max-num-seqs=1", "--max-num-batched-tokens=16"]
QUESTIONS = ["What is 47 + 35?", "Which is larger, 31 or 57?", "Count from 4 to 9."]
GREEDY = {"temperature": 0, "max_tokens": 24}


def answers(server: DemoServer, model: str) -> list[tuple[str | None, str]]:
    """Text and finish reason of each question's answer."""
    with server.client() as client:
        asked = (
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **GREEDY)
            for text in QUESTIONS
        )
        return [(answer.choices[0].message.content, answer.choices[0].finish_reason) for answer in asked]


def test_the_server_answers_as_from_safetensors(tmp_path, server, engine_flags):
    config, tensors = LlamaConfig.from_file(DEMO_FOLDER), load_file(DEMO_FOLDER / "model.safetensors")
    path = gguf_files.write(tmp_path / "demo.gguf", config, tensors, Type.Q8_0, tokenizer=DEMO_FOLDER)
    with serve_exported("--model", str(path), *engine_flags, *FEW_SHAPES) as gguf_server:
        said = " ".join(gguf_server.lines)
        assert "GGUF Q8_0 checkpoint, requantised: projections and head are int8" in said
        assert answers(gguf_server, str(path)) == answers(server, "demo")
