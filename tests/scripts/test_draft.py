"""Which draft models a start takes, and which it refuses in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from model.config import LlamaConfig
from model.loading.source import DEMO, DEMO_FOLDER
from scripts.wiring.draft import DEMO_DRAFT, choose_draft, draft_cost
from scripts.wiring.settings import EngineSettings
from scripts.wiring.weights import ChosenWeights, choose_weights


def chosen(
    *, max_model_len: int = 512, model: str | None = None, target: str = DEMO, **settings: object
) -> ChosenWeights | None:
    config = {"method": "draft_model", "num_speculative_tokens": 3} | ({} if model is None else {"model": model})
    asked = EngineSettings(model=target, speculative_config=config, **settings)
    draft = choose_draft(asked, choose_weights(asked, "cpu"), "cpu", max_model_len)
    return None if draft is None else draft.weights


def test_the_demo_has_a_draft_model_of_its_own() -> None:
    found = chosen(quantization="int8", kv_cache_dtype="int8")
    assert found is not None
    assert found.source.path == DEMO_DRAFT
    assert (found.config.num_layers, found.dtype, found.quantization) == (1, "float32", None)
    assert sum(path.stat().st_size for path in DEMO_DRAFT.iterdir()) < 1_000_000
    assert (DEMO_DRAFT / "tokenizer.json").read_bytes() == (DEMO_FOLDER / "tokenizer.json").read_bytes()


def test_without_drafts_of_a_model_there_is_none() -> None:
    for config in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        asked = EngineSettings(speculative_config=config)
        assert choose_draft(asked, choose_weights(asked, "cpu"), "cpu", 512) is None


def test_another_model_needs_a_name(tmp_path: Path) -> None:
    shutil.copytree(DEMO_FOLDER, tmp_path / "copy")
    with pytest.raises(ValueError, match='--speculative-config: add a "model"'):
        chosen(target=str(tmp_path / "copy"))


def test_a_draft_model_that_is_not_there_is_refused_with_the_flag() -> None:
    with pytest.raises(ValueError, match="--speculative-config: the draft model: no model 'nowhere'"):
        chosen(model="nowhere")


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 128256 tokens, and the model 1536"):
        chosen(model="preset:llama-3.2-1b", load_format="dummy")
    tokenizer = json.loads((DEMO_DRAFT / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    folder = tmp_path / "swapped"
    shutil.copytree(DEMO_DRAFT, folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"other tokens than the model \(2 differ"):
        chosen(model=str(folder))


def test_a_shorter_context_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DEMO_DRAFT, tmp_path / "short")
    config = json.loads((DEMO_DRAFT / "config.json").read_text()) | {"max_position_embeddings": 256}
    (tmp_path / "short" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trained for 256 tokens: --max-model-len 512 is more"):
        chosen(model=str(tmp_path / "short"))
    assert chosen(model=str(tmp_path / "short"), max_model_len=256) is not None


def test_the_time_of_a_pass_is_the_share_of_the_weights() -> None:
    draft, model = LlamaConfig.from_file(DEMO_DRAFT), LlamaConfig.from_file(DEMO_FOLDER)
    # All parameters but the norms' scales are multiplied: the embedding is the head, too.
    assert draft_cost(draft, model, "tpu") == pytest.approx((393_600 - 3 * 128) / (3_148_032 - 9 * 256))
    assert draft_cost(model, model, "gpu") == 1
    assert draft_cost(draft, model, "cpu") == 0.2
