"""Which draft models a start takes, and which it refuses in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from model.config import LlamaConfig
from model.families import LLAMA
from model.loading.source import DEMO, DEMO_FOLDER
from scripts.building.draft import DEMO_DRAFT, choose_draft, draft_cost
from scripts.building.weights import ChosenWeights, choose_weights
from scripts.flags.settings import EngineSettings
from tests.c_compiler import compiler
from tests.model.checkpoints import write_tensors
from tests.model.quantization.test_checkpoint_form import compressed


def chosen(
    *,
    max_model_len: int = 512,
    model: str | None = None,
    form: str | None = None,
    target: str = DEMO,
    **settings: object,
) -> ChosenWeights | None:
    given = {name: value for name, value in {"model": model, "quantization": form}.items() if value is not None}
    config = {"method": "draft_model", "num_speculative_tokens": 3} | given
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


def write_int8(source: Path, folder: Path) -> None:
    """The checkpoint with its projections in int8, each row with a scale, as compressed-tensors writes them."""
    shutil.copytree(source, folder)
    raw = json.loads((folder / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for module in LLAMA.projections(raw["num_hidden_layers"]):
        wide = tensors[f"{module}.weight"].astype(np.float32)
        scale = np.abs(wide).max(axis=1, keepdims=True) / 127
        tensors |= {f"{module}.weight": np.rint(wide / scale).astype(np.int8), f"{module}.weight_scale": scale}
    write_tensors(folder, tensors)
    form = compressed("int-quantized", strategy="channel", type="int")
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": form}))


@pytest.mark.parametrize(("asked", "kept"), [("int8", "int8"), ("fp8", "int8"), ("int4", "int4-g128")])
def test_a_draft_model_is_quantised_as_its_config_says(asked: str, kept: str) -> None:
    """A CPU reads no fp8, of a draft model as of a model."""
    compiler()  # without one it reads int8 only
    found = chosen(form=asked)
    assert found is not None
    assert str(found.quantization) == kept
    assert any(found.quantization.in_words() in line for line in found.remarks())


def test_a_quantised_draft_model_is_read_as_it_is(tmp_path: Path) -> None:
    """One of compressed-tensors; the model's weights are not quantised."""
    write_int8(DEMO_DRAFT, tmp_path / "narrow")
    found = chosen(model=str(tmp_path / "narrow"))
    assert found is not None
    assert found.quantization == "int8"


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
    assert draft_cost(draft, model, "cpu") == pytest.approx(0.2, rel=0.01)
    assert draft_cost(model, model, "cpu") == 1


@pytest.mark.parametrize(
    ("form", "of_model", "share"), [(None, None, 1), ("int8", None, 1 / 4), (None, "int8", 4), ("int8", "int8", 1)]
)
def test_the_time_of_a_pass_is_counted_in_bytes(form: str | None, of_model: str | None, share: float) -> None:
    config = {"method": "draft_model", "num_speculative_tokens": 3} | ({} if form is None else {"quantization": form})
    asked = EngineSettings(model=DEMO, speculative_config=config, quantization=of_model)
    model = choose_weights(asked, "cpu")
    draft = choose_draft(asked, model, "cpu", 512)
    assert draft is not None
    alone = draft_cost(draft.network, model.config, "gpu")
    assert draft.cost(model, "gpu") == pytest.approx(share * alone)
