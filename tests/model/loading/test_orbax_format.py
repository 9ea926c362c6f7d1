from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax import nnx

from model.config import LlamaConfig
from model.loading.orbax_format import save_orbax
from model.loading.stored_weights import find_weights
from model.loading.weights import load_hf
from model.network.sharding import make_mesh
from model.quantization.forms import EightBit, FourBit, MixedForms
from scripts import convert_checkpoint
from tests.model import checkpoints
from tests.model.goldens import make as make_goldens
from tests.model.loaded import assert_equal, flat, load_orbax
from tests.model.loading.test_packed_checkpoints import FORMATS
from tests.model.loading.test_packed_checkpoints import write as write_packed


def load(tmp_path, variant, **options):
    """The variant's config and its model as loaded from safetensors."""
    folder = checkpoints.write(tmp_path / "hf", variant)
    config = LlamaConfig.from_file(folder)
    return config, load_hf(folder, config, **options)


def same(first, second) -> None:
    assert_equal(flat(first), flat(second))


@pytest.mark.parametrize(("stored", "asked"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
def test_it_is_cast_to_the_dtype_that_is_asked_for(stored, asked, tmp_path):
    config, model = load(tmp_path, "bf16" if stored == jnp.bfloat16 else "gqa2", dtype=stored)
    save_orbax(model, tmp_path / "orbax", config)
    expected = load_hf(tmp_path / "hf", config, dtype=asked)
    same(load_orbax(tmp_path / "orbax", config, dtype=asked), expected)


ORBAX_ALONE = """
import sys
import numpy as np
import orbax.checkpoint as ocp
with ocp.StandardCheckpointer() as checkpointer:
    arrays = checkpointer.restore(sys.argv[1])
np.savez(sys.argv[2], **{name: np.asarray(value).view(np.uint16) for name, value in arrays.items()})
print([name for name in sys.modules if name.split(".")[0] in ("model", "pallas_kernels", "scripts")])
"""


def test_orbax_alone_finds_every_array_by_its_name_with_the_same_bits(tmp_path):
    """The oracle is the safetensors file."""
    folder = checkpoints.write(tmp_path / "hf", "bf16")
    assert convert_checkpoint.main([str(folder), str(tmp_path / "out")]) == 0
    command = [sys.executable, "-c", ORBAX_ALONE, str(tmp_path / "out/orbax/arrays"), str(tmp_path / "found.npz")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    config = LlamaConfig.from_file(folder)
    ours = {
        "self_attn": "attention", "q_proj": "qkv.q_proj", "k_proj": "qkv.k_proj", "v_proj": "qkv.v_proj",
        "o_proj": "out", "gate_proj": "gate_up.gate_proj", "up_proj": "gate_up.up_proj", "down_proj": "down",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm", "lm_head": "head",
    }  # fmt: skip

    def our_name(key: str) -> str:
        if key == "model.embed_tokens.weight":
            return "embedding"
        name = ".".join(ours.get(part, part) for part in key.removeprefix("model.").split("."))
        return name.replace(".weight", ".scale" if "norm" in name else ".kernel")

    expected = {our_name(key): value for key, value in checkpoints.tensors("bf16").items()}
    assert len(expected) > 9 * config.num_layers
    with np.load(tmp_path / "found.npz") as found:
        assert {*found} == {*expected}
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value.view(np.uint16), err_msg=name)


def test_any_number_of_chips_takes_whole_chunks(tmp_path):
    """Of 8 heads, 2 of keys and values, 256 inputs of `down` and 112 tokens."""
    folder = wide(tmp_path / "hf", "gqa2")
    config = LlamaConfig.from_file(folder)
    save_orbax(load_hf(folder, config, dtype=jnp.float32), tmp_path / "orbax", config)
    stored = ocp.PyTreeCheckpointHandler().metadata(epath.Path(tmp_path / "orbax" / "arrays")).tree
    chunks = {name: array.storage.chunk_shape for name, array in stored.items()}
    rows = config.vocab_size // math.gcd(config.vocab_size, 8)
    assert chunks["embedding"] == (rows, config.hidden_size)
    assert chunks["layers.0.attention.qkv.q_proj.kernel"] == (16, config.hidden_size)
    assert chunks["layers.0.attention.qkv.v_proj.kernel"] == (16, config.hidden_size)
    assert chunks["layers.1.mlp.gate_up.up_proj.kernel"] == (256 // math.gcd(config.vocab_size, 8), config.hidden_size)
    assert chunks["layers.1.attention.out.kernel"] == (config.hidden_size, 128 // math.gcd(config.vocab_size, 8))


@pytest.mark.parametrize("kind", ["flip", "cut", "empty", "zeros", "delete"])
def test_damage_to_any_file_is_told_in_one_line_if_it_is_told(kind, tmp_path):
    """Only what Orbax and TensorStore notice: neither has checksums of the weights themselves."""
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
            load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)
        except ValueError as error:
            complaints.append(str(error))
        path.write_bytes(sound)
    assert complaints  # of the manifest at least, which has a checksum
    for complaint in complaints:
        assert "convert again" in complaint and len(complaint.splitlines()) == 1, complaint


def test_arrays_of_another_shape_and_missing_ones_are_refused(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    shutil.rmtree(tmp_path / "orbax" / "arrays")
    arrays = flat(model)  # with fused projections
    of_other_models = {
        "embedding cannot be read: convert again (its shape is [191, 64] and should be [192, 64])": arrays
        | {"embedding": arrays["embedding"][1:]},
        "layers.0.attention.qkv.q_proj.kernel cannot be read: convert again (NOT_FOUND": arrays,
    }
    for complaint, other in of_other_models.items():
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "orbax" / "arrays", other, force=True)
        with pytest.raises(ValueError, match=re.escape(f"orbax: {complaint}")) as error:
            load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "change", [{"kv_ranges": "one"}, {"dtype": "int8"}, {"config": 5}, {"quantization": "int"}, None]
)
def test_a_description_that_makes_no_sense_is_refused(change, tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    path = tmp_path / "orbax" / "stored.json"
    damaged = path.read_text().replace("hidden_size", "hifden_size")
    path.write_text(json.dumps(json.loads(path.read_text()) | change) if change else damaged)
    words = r"stored\.json is damaged" if change else r"the config next to it \(hifden_size differ\)"
    with pytest.raises(ValueError, match=f"{words}: convert again"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)


@pytest.mark.parametrize("ranges", [[[[1, 1], [1]]] * 3, [[[1.0, 1.0]] * 2] * 2, [[[1.0, -1.0]] * 2] * 3, [[[]]]])
def test_ranges_of_another_model_are_refused(ranges, tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    sound = np.float32(np.random.default_rng(0).uniform(0.1, 9, (config.num_layers, 2, config.num_kv_heads)))
    save_orbax(model, tmp_path / "orbax", config, sound)
    np.testing.assert_array_equal(find_weights(tmp_path, config).kv_ranges(), sound)
    path = tmp_path / "orbax" / "stored.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kv_ranges": ranges}))
    with pytest.raises(ValueError, match=r"stored\.json is damaged: convert again \(kv_ranges must"):
        find_weights(tmp_path, config).kv_ranges()


WIDE = {"num_attention_heads": 8, "head_dim": 16, "intermediate_size": 256}  # with 2 heads of keys and of values


def wide(folder, variant, **sizes):
    """A checkpoint for 1 to 8 chips; from four chips on, some share a head of keys and values."""
    raw = make_goldens.config(variant) | WIDE | sizes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    checkpoints.write_tensors(folder, make_goldens.tensors(raw, 0))
    return folder


IN_PARTS = MixedForms(  # of two fused projections, the tensors
    most=FourBit(group=16),
    others=(
        ("layers.0.attention.qkv.k_proj", EightBit.INT8),
        ("layers.1.attention.qkv.v_proj", EightBit.INT8),
        ("layers.1.mlp.gate_up.gate_proj", EightBit.INT8),
    ),
)
FORMS = [None, EightBit.INT8, EightBit.FP8, FourBit(group=16), FourBit(group=16, has_zeros=True), IN_PARTS]


@pytest.mark.parametrize(
    ("variant", "form"),
    [*(("gqa2", form) for form in FORMS), ("tied", None), ("tied", EightBit.INT8)],
    ids=str,
)
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
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 7}))
    with pytest.raises(ValueError, match="has format 7, this version reads 8: convert again"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)
    path.unlink()
    with pytest.raises(ValueError, match="no finished conversion"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)


def test_nothing_is_overwritten(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    with pytest.raises(ValueError, match="already exists"):
        save_orbax(model, tmp_path / "orbax", config)
