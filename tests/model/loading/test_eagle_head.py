"""Which folders of EAGLE heads are read, and what is refused by name."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.eagle_config import EagleConfig, EagleForm
from model.loading.eagle_head import HeadFiles, load_head
from model.loading.torch_file import read_torch_file
from model.network.eagle import EagleHead
from tests.model import eagle_heads
from tests.model.goldens import make_eagle

THIRD, FIRST = "eagle3", "eagle"


def config_of(variant: str = THIRD, **changes: object) -> EagleConfig:
    form = EagleForm.EAGLE3 if make_eagle.is_third(variant) else EagleForm.EAGLE
    return EagleConfig.from_hf(make_eagle.config(variant) | changes, form, eagle_heads.MODEL)


def loaded(folder: Path, config: EagleConfig, *, has_embedding: bool = False) -> EagleHead:
    return load_head(folder, config, dtype=jnp.float32, has_embedding=has_embedding)


def same(one: EagleHead, other: EagleHead) -> bool:
    pairs = zip(jax.tree.leaves(nnx.state(one)), jax.tree.leaves(nnx.state(other)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_a_file_of_torch_save_holds_the_same_head_as_safetensors(tmp_path) -> None:
    with_safetensors, with_torch = eagle_heads.written(tmp_path / "a", THIRD), tmp_path / "b"
    with_torch.mkdir()
    shutil.copy(make_eagle.FOLDER / "eagle3.bin", with_torch / "pytorch_model.bin")
    head = loaded(with_torch, config_of())
    assert head.embedding is None
    assert same(head, loaded(with_safetensors, config_of()))
    assert head.to_draft[...][head.to_model[...]].tolist() == list(range(80))
    assert head.fc.kernel.get_value().dtype == jnp.float32


@pytest.mark.parametrize(
    ("old", "new"), [("midlayer.", "layers.0."), ("midlayer.", "model.layers.0."), ("", "model."), ("d2t", "model.d2t")]
)
def test_the_names_of_other_trainers_are_read(old, new, tmp_path) -> None:
    tensors = eagle_heads.stored(THIRD)
    renamed = {new + name.removeprefix(old) if name.startswith(old) else name: x for name, x in tensors.items()}
    assert renamed.keys() != tensors.keys()
    renamed["midlayer.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    other = eagle_heads.write(tmp_path / "other", make_eagle.config(THIRD), renamed)
    assert same(loaded(other, config_of()), loaded(eagle_heads.written(tmp_path / "usual", THIRD), config_of()))


@pytest.mark.parametrize("kept", ["both", "neither"])
def test_a_head_that_drafts_all_tokens_needs_no_tables(kept, tmp_path) -> None:
    tensors = eagle_heads.stored("eagle3_all_tokens")
    if kept == "both":
        tensors |= {"d2t": np.zeros(make_eagle.VOCAB, np.int64), "t2d": np.ones(make_eagle.VOCAB, np.bool_)}
    folder = eagle_heads.write(tmp_path, make_eagle.config("eagle3_all_tokens"), tensors)
    assert loaded(folder, config_of("eagle3_all_tokens")).vocabulary is None


@pytest.mark.parametrize(
    ("variant", "change", "words"),
    [
        (THIRD, {"fc.weight": None, "norm.weight": None}, r"missing: fc.weight, norm.weight"),
        (THIRD, {"d2t": None}, "missing: d2t"),
        (THIRD, {"fc.bias": np.zeros(64, np.float16)}, "unexpected: fc.bias"),
        (FIRST, {"lm_head.weight": np.zeros((192, 64), np.float16)}, "unexpected: lm_head.weight"),
        (FIRST, {"layers.1.mlp.up_proj.weight": np.zeros((112, 64), np.float16)}, "unexpected"),
        (THIRD, {"fc.weight": np.zeros((64, 128), np.float16)}, r"fc.weight has shape \(64, 128\), not \(64, 192\)"),
        (THIRD, {"model.fc.weight": np.zeros((64, 192), np.float16)}, "are the same tensor"),
    ],
)
def test_tensors_that_are_not_those_of_the_head_are_refused_by_name(variant, change, words, tmp_path) -> None:
    tensors = {name: x for name, x in (eagle_heads.stored(variant) | change).items() if x is not None}
    folder = eagle_heads.write(tmp_path, make_eagle.config(variant), tensors)
    with pytest.raises(ValueError, match=words):
        HeadFiles(folder, config_of(variant))


@pytest.mark.parametrize(
    ("d2t", "t2d", "words"),
    [
        (np.full(80, 113), None, "a token of its own below 192"),
        (np.append(np.zeros(79), -1), None, "a token of its own"),
        (np.zeros(80), np.arange(192) < 79, "name different tokens"),
    ],
)
def test_tables_that_contradict_are_refused(d2t, t2d, words, tmp_path) -> None:
    tensors = eagle_heads.stored(THIRD) | {"d2t": d2t.astype(np.int64)}
    if t2d is not None:
        tensors["t2d"] = t2d
    folder = eagle_heads.write(tmp_path, make_eagle.config(THIRD), tensors)
    with pytest.raises(ValueError, match=words):
        loaded(folder, config_of())


@pytest.mark.parametrize(
    ("variant", "change", "words"),
    [
        (THIRD, {"architectures": ["Eagle3Speculator"]}, r"architectures=\['Eagle3Speculator'\] is not supported"),
        (THIRD, {"num_hidden_layers": 2}, "num_hidden_layers=2"),
        (THIRD, {"norm_before_fc": True}, "norm_before_fc=True"),
        (THIRD, {"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state=False"),
        (FIRST, {"bias": True}, "bias=True"),
        (THIRD, {"vocab_size": 200}, "it has 200 tokens, and the model 192"),
        (THIRD, {"hidden_size": 48}, "reads hidden states of width 48, and the model's are 64 wide"),
        (FIRST, {"hidden_size": 48, "target_hidden_size": 64}, "must be the model's"),
        (THIRD, {"draft_vocab_size": 193}, "draft_vocab_size 193 is more than"),
        (FIRST, {"draft_vocab_size": 80}, "take the method eagle3"),
        (THIRD, {"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, "the model has 6"),
    ],
)
def test_settings_that_are_not_computed_or_do_not_fit_are_refused_by_name(variant, change, words) -> None:
    with pytest.raises(ValueError, match=words):
        config_of(variant, **change)


@pytest.mark.parametrize(
    ("fields", "taps"),
    [
        ({}, (2, 3, 3)),  # of 6 layers: the third one, the middle one, the last but two
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}, (0, 2, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}, (2, 3, 3)),  # the usual ones in the other count
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 3]}}, (2, 3, 3)),
    ],
)
def test_the_layers_that_are_read(fields, taps) -> None:
    assert config_of(**fields).taps == taps


def test_a_folder_without_a_head_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"a head is a folder with its config\.json"):
        EagleConfig.from_file(tmp_path, EagleForm.EAGLE3, eagle_heads.MODEL)
    with pytest.raises(ValueError, match="no safetensors files"):
        HeadFiles(tmp_path, config_of())


class _Runs:
    def __reduce__(self):
        return print, ("code of a checkpoint runs",)


def test_a_pickle_cannot_run_code(tmp_path, capsys) -> None:
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"fc.weight": _Runs()}, protocol=2))
    with pytest.raises(ValueError, match=r"needs '__builtin__.print'.*store it as safetensors"):
        read_torch_file(tmp_path / "x.bin")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("size", [0, 1000])
def test_damaged_files_are_refused(size, tmp_path) -> None:
    (tmp_path / "x.bin").write_bytes((make_eagle.FOLDER / "eagle3.bin").read_bytes()[:size])
    with pytest.raises(ValueError, match="is not a ZIP archive"):
        read_torch_file(tmp_path / "x.bin")


def test_the_index_of_several_files_is_followed(tmp_path) -> None:
    tensors = list(eagle_heads.stored(FIRST).items())
    config, names = make_eagle.config(FIRST), ("a.safetensors", "b.safetensors")
    for name, part in zip(names, (tensors[:4], tensors[4:]), strict=True):
        eagle_heads.write(tmp_path, config, dict(part))
        (tmp_path / "model.safetensors").rename(tmp_path / name)
    index = {key: names[i >= 4] for i, (key, _) in enumerate(tensors)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    usual = eagle_heads.written(tmp_path / "one", FIRST)
    assert same(loaded(tmp_path, config_of(FIRST)), loaded(usual, config_of(FIRST)))
