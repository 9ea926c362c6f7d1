"""Which EAGLE heads a start takes, and which it refuses in words."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from model.config import LlamaConfig
from model.eagle_config import EagleConfig, EagleForm
from model.loading.source import DEMO, DEMO_FOLDER
from scripts.building.draft import ChosenHead, choose_draft, draft_cost
from scripts.building.weights import choose_weights
from scripts.flags.settings import EngineSettings
from tests.model import eagle_heads

THIRD = EagleForm.EAGLE3


def chosen(folder: Path | str, form: EagleForm = THIRD, *, max_model_len: int = 512, **settings: object) -> ChosenHead:
    config = {"method": str(form), "model": str(folder), "num_speculative_tokens": 3}
    asked = EngineSettings(**{"model": DEMO, "speculative_config": config, **settings})
    draft = choose_draft(asked, choose_weights(asked, "cpu"), "cpu", max_model_len)
    assert draft is not None
    assert draft.settings.quantization is None
    assert isinstance(draft.weights, ChosenHead)
    return draft.weights


@pytest.mark.parametrize("form", EagleForm)
def test_a_head_in_a_folder_is_taken(form, tmp_path) -> None:
    head = chosen(eagle_heads.random_for(tmp_path, form, DEMO_FOLDER), form, quantization="int8", kv_cache_dtype="int8")
    assert (head.eagle.form, head.dtype, head.has_embedding, head.context_remark) == (form, "float32", False, None)
    assert not head.is_random


def test_a_copy_of_the_models_embedding_is_shared_and_another_one_is_loaded(tmp_path) -> None:
    folder = eagle_heads.random_for(tmp_path, THIRD, DEMO_FOLDER)
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    embedding = load_file(DEMO_FOLDER / "model.safetensors")["model.embed_tokens.weight"]
    assert embedding.dtype == ml_dtypes.bfloat16
    for change, is_own in ((0, False), (1, True)):
        copy = embedding.astype(np.float16)
        copy[-1, -1] += change
        eagle_heads.write(folder, raw, tensors | {"embed_tokens.weight": copy})
        head = chosen(folder)
        assert head.has_embedding is is_own
        assert any("an embedding of its own" in line for line in head.remarks()) is is_own


def test_a_narrow_head_needs_an_embedding(tmp_path) -> None:
    narrow = {"hidden_size": 128, "target_hidden_size": 256}
    folder = eagle_heads.random_for(tmp_path, THIRD, DEMO_FOLDER, **narrow)
    with pytest.raises(ValueError, match="a head of width 128 cannot share the model's embedding, and has none"):
        chosen(folder)
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = np.zeros((1536, 128), np.float16)
    assert chosen(eagle_heads.write(folder, raw, tensors)).has_embedding


def test_random_weights_need_the_config_only(tmp_path) -> None:
    folder = eagle_heads.random_for(tmp_path, THIRD, DEMO_FOLDER)
    (folder / "model.safetensors").unlink()
    head = chosen(folder, load_format="dummy")
    assert (head.is_random, head.has_embedding) == (True, False)
    with pytest.raises(ValueError, match="--speculative-config: no safetensors files"):
        chosen(folder)


def test_a_shorter_context_is_said_at_start(tmp_path) -> None:
    folder = eagle_heads.random_for(tmp_path, THIRD, DEMO_FOLDER, max_position_embeddings=256)
    assert chosen(folder, max_model_len=256).context_remark is None
    assert any("trained for 256 tokens" in line for line in chosen(folder).remarks())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nowhere", "no head 'nowhere': it can be a folder or a hub name"),
        (str(DEMO_FOLDER), "num_hidden_layers=4 is not supported"),
        ("gs:/bucket/head", "a URL is written as gs://bucket/folder"),
    ],
)
def test_what_is_no_head_is_refused_with_the_flag(model, words) -> None:
    with pytest.raises(ValueError, match=f"--speculative-config: .*{words}"):
        chosen(model)


def test_a_head_of_another_model_is_refused(tmp_path) -> None:
    folder = eagle_heads.random_for(tmp_path, THIRD, DEMO_FOLDER)
    with pytest.raises(
        ValueError, match="it has 1536 tokens, and the model 128256; it reads hidden states of width 256"
    ):
        chosen(folder, model="preset:llama-3.2-1b", load_format="dummy")


def test_the_time_of_a_pass_is_the_share_of_the_weights() -> None:
    """All parameters but the norms' scales and the tables are multiplied."""
    model = LlamaConfig.from_file(DEMO_FOLDER)
    raw = json.loads((DEMO_FOLDER / "config.json").read_text()) | {"num_hidden_layers": 1}
    attention, mlp = 256 * 256 * 2 + 2 * 128 * 256, 3 * 640 * 256
    total = 3_148_032 - 9 * 256
    first = EagleConfig.from_hf(raw, EagleForm.EAGLE, model)
    assert draft_cost(first, model, "tpu") == pytest.approx((attention + mlp + 2 * 256**2 + 1536 * 256) / total)
    third = EagleConfig.from_hf(raw | {"draft_vocab_size": 512}, THIRD, model)
    wide = 256 * 256 + 2 * 128 * 256
    assert draft_cost(third, model, "tpu") == pytest.approx((attention + wide + mlp + 512 * 256) / total)
