"""The step's bench, on a model of a few thousand weights: what it prints and writes, not how fast it was."""

from __future__ import annotations

import json

import pytest

from scripts.lab import step
from tests.conftest import COMPILED

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_every_shape_is_timed(folder, capsys):
    output = folder / "figures.json"
    flags = ["--model", str(folder), "--load-format", "dummy", "--device", "cpu", "--compile-cache", str(COMPILED)]
    shapes = ["--rows", "1,3", "--prefill", "16", "--context", "20", "--steps", "3", "--num-pages", "40"]
    assert step.main([*flags, *shapes, "--json", str(output)]) == 0
    written = json.loads(output.read_text())
    assert [(s["num_tokens"], s["num_rows"], s["context"]) for s in written["steps"]] == [
        (1, 1, 20),
        (3, 3, 20),
        (16, 1, 20),
    ]
    for timing in written["steps"]:
        assert timing["ratio"] == pytest.approx(timing["step_ms"] / timing["products_ms"])
        assert timing["tokens_per_s"] == pytest.approx(timing["num_tokens"] / timing["step_ms"] * 1e3)
    printed = capsys.readouterr().out
    for name in ("decode 1", "decode 3", "prefill 16"):
        assert name in printed
