from __future__ import annotations

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from model.config import LlamaConfig
from model.loading.orbax_format import load_orbax, save_orbax
from model.loading.weights import load_hf
from model.network.sharding import make_mesh
from model.quantization.forms import EightBit, FourBit, Mixed
from tests.model import checkpoints
from tests.model.goldens import make as make_goldens
from tests.model.loading.test_packed_checkpoints import FORMATS
from tests.model.loading.test_packed_checkpoints import write as write_packed
from tests.model.loading.test_weights import flat


def load(tmp_path, variant, **options):
    """The variant's config and its model as loaded from safetensors."""
    folder = checkpoints.write(tmp_path / "hf", variant)
    config = LlamaConfig.from_file(folder)
    return config, load_hf(folder, config, **options)


def same(first, second) -> None:
    first, second = flat(first), flat(second)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_it_is_cast_to_the_dtype_that_is_asked_for(tmp_path):
    config, model = load(tmp_path, "bf16", dtype=jnp.bfloat16)
    save_orbax(model, tmp_path / "orbax", config)
    _, expected = load(tmp_path, "bf16", dtype=jnp.float32)
    same(load_orbax(tmp_path / "orbax", config, dtype=jnp.float32), expected)


def test_orbax_itself_reads_what_is_saved(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.bfloat16)
    save_orbax(model, tmp_path / "orbax", config)
    expected = flat(model)
    restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in expected}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        options = ocp.args.PyTreeRestore(restore_args=restore_args)
        restored = checkpointer.restore(tmp_path / "orbax" / "arrays", args=options)
    for name, value in expected.items():
        found = restored[name]
        if name.endswith(("attention.out.kernel", "mlp.down.kernel")):  # these are cut by columns
            found = np.moveaxis(found, 0, 1)
        np.testing.assert_array_equal(found.reshape(value.shape).view(np.uint16), value.view(np.uint16), err_msg=name)


@pytest.mark.parametrize("chips", [1, 4])
def test_a_changed_byte_is_found_and_its_array_and_part_are_named(chips, tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    mesh = None if chips == 1 else make_mesh(chips)
    files = {path: path.read_bytes() for path in (tmp_path / "orbax").rglob("*") if path.is_file()}
    named = set()
    matrices = {name: value for name, value in flat(model).items() if value.ndim == 2}  # the rest lies compressed
    for name, value in matrices.items():
        last_row = value[-1].tobytes()[: 16 * 4]  # of a matrix that is cut by columns, of the first part
        found = [(path, raw.find(last_row)) for path, raw in files.items() if last_row in raw]
        assert len(found) == 1, name
        path, at = found[0]
        path.write_bytes(files[path][:at] + bytes([files[path][at] ^ 1]) + files[path][at + 1 :])
        with pytest.raises(ValueError, match=r"is damaged, .*: convert again") as error:
            load_orbax(tmp_path / "orbax", config, dtype=jnp.float32, mesh=mesh)
        path.write_bytes(files[path])
        named.add(re.search(r"orbax: (.*) is damaged", str(error.value))[1])
    # 4 heads, 2 of keys and of values; 4 divides the rest, too
    assert {"part 4 of 4 of embedding", "part 8 of 8 of layers.0.attention.qkv.kernel"} <= named
    assert {"part 8 of 8 of layers.2.mlp.gate_up.kernel", "part 1 of 4 of layers.1.mlp.down.kernel"} <= named
    assert len(named) == len(matrices)
    same(load_orbax(tmp_path / "orbax", config, dtype=jnp.float32), model)


@pytest.mark.parametrize("kind", ["flip", "cut", "empty", "zeros", "delete"])
def test_no_damage_to_any_file_goes_unseen_or_is_told_in_anything_but_one_line(kind, tmp_path):
    config, model = load(tmp_path, "tied", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    generator = np.random.default_rng(0)
    complaints = []
    for path in sorted(path for path in (tmp_path / "orbax").rglob("*") if path.is_file()):
        sound = path.read_bytes()
        at = int(generator.integers(len(sound)))
        spoiled = {
            "flip": sound[:at] + bytes([sound[at] ^ 1 << int(generator.integers(8))]) + sound[at + 1 :],
            "cut": sound[:at],
            "empty": b"",
            "zeros": sound[:at] + bytes(len(sound[at : at + 64])) + sound[at + 64 :],
        }
        if kind == "delete":
            path.unlink()
        else:
            path.write_bytes(spoiled[kind])
        try:
            same(load_orbax(tmp_path / "orbax", config, dtype=jnp.float32), model)  # a file that is not needed
        except ValueError as error:
            complaints.append(str(error))
        path.write_bytes(sound)
    assert len(complaints) >= 3  # the description, the manifest and the data at least
    for complaint in complaints:
        assert "convert again" in complaint and len(complaint.splitlines()) == 1, complaint


def test_a_damaged_name_in_the_description_is_told_in_one_line(tmp_path):
    config, model = load(tmp_path, "tied", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    path = tmp_path / "orbax" / "stored.json"
    path.write_text(path.read_text().replace("hidden_size", "hifden_size"))
    with pytest.raises(ValueError, match=r"the config next to it \(hifden_size differ\): convert again"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)


def test_arrays_of_another_shape_or_without_a_checksum_are_refused(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    path = tmp_path / "orbax" / "stored.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"dtype": "bfloat16"}))
    with pytest.raises(ValueError, match=r"is float32\[4, 48, 64\] and should be bfloat16\[4, 48, 64\]: convert again"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)
    del raw["checksums"]["norm.scale"]
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"lacks checksums of norm\.scale: convert again"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)


@pytest.mark.parametrize("change", [{"kv_ranges": "one"}, {"dtype": "int8"}, {"config": 5}, {"checksums": {"a": 1}}])
def test_a_description_that_makes_no_sense_is_refused(change, tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    path = tmp_path / "orbax" / "stored.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"stored\.json is damaged: convert again"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)


WIDE = {"num_attention_heads": 8, "head_dim": 16, "intermediate_size": 256}  # with 2 heads of keys and of values


def wide(folder, variant, **sizes):
    """A checkpoint for 1 to 8 chips; from four chips on, some share a head of keys and values."""
    raw = make_goldens.config(variant) | WIDE | sizes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    checkpoints.write_tensors(folder, make_goldens.tensors(raw, 0))
    return folder


IN_PARTS = Mixed(  # of two fused projections, the tensors
    most=FourBit(group=16),
    others=(
        ("layers.0.attention.qkv.k_proj", EightBit.INT8),
        ("layers.1.attention.qkv.v_proj", EightBit.INT8),
        ("layers.1.mlp.gate_up.gate_proj", EightBit.INT8),
    ),
)
FORMS = [None, EightBit.INT8, EightBit.FP8, FourBit(group=16), FourBit(group=16, has_zeros=True), IN_PARTS]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("variant", ["gqa2", "tied"])
def test_what_is_stored_once_is_loaded_on_any_number_of_chips(variant, form, tmp_path):
    folder = wide(tmp_path / "hf", variant)
    if isinstance(form, FourBit) and form.has_zeros:
        write_packed(tmp_path / "awq", FORMATS["awq"], group=16, source=folder)
        folder = tmp_path / "awq"
    options, config = {"dtype": jnp.bfloat16, "quantization": form}, LlamaConfig.from_file(folder)
    save_orbax(load_hf(folder, config, **options), tmp_path / "orbax", config)
    for chips in (1, 2, 4, 8):
        mesh = None if chips == 1 else make_mesh(chips)
        expected = load_hf(folder, config, mesh=mesh, **options)
        restored = load_orbax(tmp_path / "orbax", config, dtype=jnp.bfloat16, mesh=mesh)
        same(restored, expected)
        for ours, like in zip(jax.tree.leaves(nnx.state(restored)), jax.tree.leaves(nnx.state(expected)), strict=True):
            assert ours.sharding == like.sharding


def test_groups_that_chips_would_cut_and_chips_that_heads_do_not_divide_over_are_refused(tmp_path):
    config, model = load(tmp_path, "gqa4", dtype=jnp.float32, quantization=FourBit(group=16))
    save_orbax(model, tmp_path / "orbax", config)
    with pytest.raises(ValueError, match=r"4 chip\(s\) would not hold whole groups \(intermediate_size: 40 inputs"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32, mesh=make_mesh(4))
    with pytest.raises(ValueError, match=r"does not divide over num_shards=3 chips: num_heads=8"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32, mesh=make_mesh(3))


def test_only_what_one_chip_holds_is_stored(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32, mesh=make_mesh(2))
    with pytest.raises(ValueError, match=r"only a model on one chip can be stored: model\.num_shards=2"):
        save_orbax(model, tmp_path / "orbax", config)


def test_another_model_is_refused_and_what_differs_is_named(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    other = replace(config, rms_norm_eps=1e-6, rope_theta=1.0, eos_token_ids=(9,))
    with pytest.raises(ValueError, match=r"another model .*\(rms_norm_eps, rope_theta differ\): convert again"):
        load_orbax(tmp_path / "orbax", other, dtype=jnp.float32)


def test_an_unfinished_conversion_and_another_format_are_refused(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    path = tmp_path / "orbax" / "stored.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))
    with pytest.raises(ValueError, match="has format 0"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)
    path.unlink()
    with pytest.raises(ValueError, match="no finished conversion"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)


def test_nothing_is_overwritten(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    with pytest.raises(ValueError, match="is not empty"):
        save_orbax(model, tmp_path / "hf", config)
