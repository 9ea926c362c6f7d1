"""GGUF files, written by the package `gguf`, against the same values in safetensors."""

from __future__ import annotations

import dataclasses
import json
import struct

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from model.config import LlamaConfig
from model.inputs.gguf import GgufFile
from model.loading import gguf_tensors
from model.loading.gguf_config import hf_config
from model.loading.hf_format import expected_shapes
from model.loading.source import DEMO_FOLDER, Kind, resolve
from model.loading.stored_weights import find_weights
from model.loading.weights import load_hf
from model.loading.weights_digest import weights_digest
from model.network.rope import inverse_frequencies
from model.network.sharding import make_mesh
from model.quantization.forms import EightBit
from scripts.building.weights import find_end_tokens
from scripts.convert_checkpoint import convert
from tests.examples import examples
from tests.model import adapters, checkpoints, gguf_blocks, gguf_files
from tests.model.dense_attention import dense_logits
from tests.model.gguf_files import Type
from tests.model.goldens.make import FOLDER
from tests.model.loaded import assert_equal, flat, load, load_wide


def write(tmp_path, variant="gqa2", type=Type.F32, **options):
    """A file, the config of the folder that it is made of, and the values that it holds."""
    folder = checkpoints.write(tmp_path / "source", variant)
    config, tensors = LlamaConfig.from_file(folder), checkpoints.tensors(variant)
    path = gguf_files.write(tmp_path / "model.gguf", config, tensors, type, **options)
    return path, config, gguf_files.values_of(tensors, type)


@pytest.mark.parametrize("num_shards", [1, 4])  # KV heads are repeated for four, and blocks cross the cuts
@pytest.mark.parametrize("type", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0])
def test_every_weight_is_the_one_that_was_written(tmp_path, type, num_shards):
    path, _, values = write(tmp_path, type=type)
    for form in (None, EightBit.INT8):
        found = load(path, form, num_shards)
        assert_equal(found, load_wide(tmp_path / "source", values, form, num_shards))


# Where the float16 scales and minima of a block are.
HALVES = {
    Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.IQ4_NL: (0,), Type.IQ4_XS: (0,),
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,),
    Type.IQ1_S: (0,), Type.IQ2_XXS: (0,), Type.IQ2_XS: (0,), Type.IQ2_S: (0,), Type.IQ3_XXS: (0,), Type.IQ3_S: (0,),
    Type.TQ1_0: (52,), Type.TQ2_0: (64,), Type.IQ1_M: (), Type.MXFP4: (),
}  # fmt: skip


def random_blocks(rng, shape, type):
    """Any bytes are a block, if its float16 scales are finite."""
    per_block, num_bytes = gguf.GGML_QUANT_SIZES[type]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // per_block, num_bytes), dtype=np.uint8)
    for place in HALVES[type]:
        scales = rng.uniform(1e-4, 1e-3, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    if type is Type.MXFP4:
        blocks[..., 0] = 117  # the exponent, with a bias of 127
    if type is Type.IQ1_M:  # the scale is in the upper halves of four bytes
        blocks[..., 49::2] = blocks[..., 49::2] & 15 | np.array([0, 16, 64, 32], np.uint8)
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("type", HALVES)
def test_blocks_are_read(tmp_path, type, num_shards):
    folder = checkpoints.write(tmp_path / "source", "gqa2")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_layers": 1}
    config = dataclasses.replace(LlamaConfig.from_file(folder), **sizes)
    rng = np.random.default_rng(0)
    zeros = {key: np.ones(shape, np.float32) for key, shape in expected_shapes(config).items()}
    values = dict(zeros)

    def packed(key, rows):
        blocks = random_blocks(rng, rows.shape, type)
        values[key] = np.asarray(gguf.quants.dequantize(blocks, type))
        return blocks, type

    path = gguf_files.write(tmp_path / "model.gguf", config, zeros, packed=packed)
    for key, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
        name = f"model.layers.0.self_attn.{key}.weight"
        wide = values[name]
        assert gguf_files.permuted(np.ascontiguousarray(wide), heads).shape == wide.shape
        pairs = wide.reshape(heads, wide.shape[0] // heads // 2, 2, -1)  # stored: neighbours are a pair
        values[name] = pairs.swapaxes(1, 2).reshape(wide.shape)
    found = load(path, None, num_shards)
    mesh = make_mesh(num_shards) if num_shards > 1 else None
    checkpoints.write_tensors(tmp_path / "source", values)
    assert_equal(found, flat(load_hf(tmp_path / "source", config, dtype=jnp.float32, mesh=mesh)))
    stored = find_weights(path, resolve(str(path)).config)
    assert (stored.quantization, stored.packing) == (EightBit.INT8, f"GGUF {type.name}")
    assert stored.dtypes == ("float32",) if stored.config.tie_word_embeddings else (type.name, "float32")


@pytest.mark.parametrize("type", gguf_blocks.DECODERS)
def test_the_package_decodes_a_block_as_the_format_says(type):
    _, num_bytes = gguf.GGML_QUANT_SIZES[type]
    blocks = random_blocks(np.random.default_rng(1), (1, 256 * 40), type).reshape(-1, num_bytes)
    found = np.asarray(gguf.quants.dequantize(blocks, type))
    wanted = np.array([gguf_blocks.DECODERS[type](bytes(block)) for block in blocks], np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("variant", ["gqa2", "tied", "head_dim_128"])
def test_the_config_is_the_one_of_the_folder(tmp_path, variant):
    path, config, _ = write(tmp_path, variant)
    found = resolve(str(path))
    assert (found.kind, found.path) == (Kind.GGUF, path)
    silent = {"checkpoint_dtype": None, "bos_token_id": None, "eos_token_ids": ()}  # of the tokenizer, which is absent
    assert found.config == dataclasses.replace(config, **silent)


def test_factors_of_frequencies_are_llama_3s_scaling(tmp_path):
    path, config, _ = write(tmp_path, "llama3_rope")
    found = resolve(str(path)).config
    wanted = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    scaled = inverse_frequencies(found.head_dim, found.rope_theta, found.rope_scaling)
    np.testing.assert_allclose(scaled, wanted, rtol=3e-7)
    tokens = checkpoints.golden_sequence("llama3_rope")
    exact = dense_logits(load_hf(tmp_path / "source", config, dtype=jnp.float32), tokens)
    np.testing.assert_allclose(dense_logits(load_hf(path, found, dtype=jnp.float32), tokens), exact, atol=2e-5)
    assert LlamaConfig.from_hf(found.to_hf()) == found


def test_linear_scaling_is_read_and_other_kinds_are_refused(tmp_path):
    def scaling(kind):
        return lambda writer: (writer.add_rope_scaling_type(kind), writer.add_rope_scaling_factor(4.0))

    path, config, _ = write(tmp_path, "linear_rope", more=scaling(gguf.RopeScalingType.LINEAR))
    assert resolve(str(path)).config.rope_scaling == config.rope_scaling
    path, _, _ = write(tmp_path, "gqa2", more=scaling(gguf.RopeScalingType.YARN))
    with pytest.raises(ValueError, match=r"model\.gguf.*rope_type='yarn' is not supported"):
        resolve(str(path))


def test_the_demo_is_the_same_model(tmp_path):
    tensors = load_file(DEMO_FOLDER / "model.safetensors")
    config = LlamaConfig.from_file(DEMO_FOLDER)
    path = gguf_files.write(tmp_path / "demo.gguf", config, tensors, Type.BF16, tokenizer=DEMO_FOLDER)
    found = resolve(str(path))
    stated = (1529,)  # the format has room for one eos token; `test_end_tokens.py` has those that the names add
    assert found.config == dataclasses.replace(config, checkpoint_dtype=None, eos_token_ids=stated)
    assert_equal(load(path), load(DEMO_FOLDER))  # bfloat16 values are kept, so that all logits are equal, too


def test_a_conversion_is_a_model_of_its_own(tmp_path, capsys):
    tensors = load_file(DEMO_FOLDER / "model.safetensors")
    config = LlamaConfig.from_file(DEMO_FOLDER)
    path = gguf_files.write(tmp_path / "demo.gguf", config, tensors, Type.Q8_0, tokenizer=DEMO_FOLDER)
    convert(resolve(str(path)), path, tmp_path / "out", dtype=None)
    assert "projections and head are int8, requantised from GGUF Q8_0" in capsys.readouterr().out
    source = resolve(str(tmp_path / "out"))
    stored = find_weights(source.path, source.config)
    assert stored.is_converted
    ends = [{token.id for token in find_end_tokens(model)} for model in (source, resolve(str(path)), resolve("demo"))]
    assert ends == [{1521, 1528, 1529}] * 3
    assert_equal(flat(stored.load(dtype=jnp.float32, quantization=EightBit.INT8)), load(path, EightBit.INT8))


def test_a_file_that_is_cut_off_is_refused_wherever_it_ends(tmp_path):
    path, _, _ = write(tmp_path)
    whole = path.read_bytes()
    start = min(tensor.offset for tensor in GgufFile.read(path).tensors.values())
    for size in [*range(0, start - 32, 97), start - 33]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.gguf (is cut off within its head|is not a GGUF file)"):
            resolve(str(path))
    for size in (start, len(whole) - 64):
        path.write_bytes(whole[:size])
        config = resolve(str(path)).config
        with pytest.raises(ValueError, match=rf"is cut off: it has {size} bytes, and its tensors end at \d+$"):
            find_weights(path, config)


@pytest.fixture(scope="module")
def a_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    config = LlamaConfig.from_file(checkpoints.write(folder / "source", "llama3_rope"))
    of_demo = LlamaConfig.from_file(DEMO_FOLDER).vocab_size
    tensors = {
        key: np.resize(value, (of_demo, value.shape[1])) if value.shape[0] == config.vocab_size else value
        for key, value in checkpoints.tensors("llama3_rope").items()
    }
    config = dataclasses.replace(config, vocab_size=of_demo)
    path = gguf_files.write(folder / "model.gguf", config, tensors, tokenizer=DEMO_FOLDER)
    find_weights(path, resolve(str(path)).config)
    return path


def moved(whole: bytes, offsets: dict[str, int]) -> bytes:
    """The file with other offsets of these tensors, counted from the first tensor."""
    changed = bytearray(whole)
    for name, offset in offsets.items():
        at = changed.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        (dimensions,) = struct.unpack_from("<I", changed, at)
        struct.pack_into("<Q", changed, at + 4 + 8 * dimensions + 4, offset)
    return bytes(changed)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_tensors_at_other_places_than_the_format_says_are_refused(a_file, tmp_path, data):
    file = GgufFile.read(a_file)
    places = {name: tensor.offset - file.start for name, tensor in file.tensors.items()}
    first, second = data.draw(st.lists(st.sampled_from(sorted(places)), min_size=2, max_size=2, unique=True))
    kind = data.draw(st.sampled_from(["overlap", "exchange", "misalign", "hole", "far"]))
    if kind == "exchange":
        offsets = {first: places[second], second: places[first]}
    else:
        step = {"overlap": places[second] - places[first], "misalign": data.draw(st.integers(1, 31)), "hole": 32}
        offsets = {first: places[first] + step.get(kind, 1 << 60)}
    path = tmp_path / "moved.gguf"
    path.write_bytes(moved(a_file.read_bytes(), offsets))
    with pytest.raises(ValueError, match=r"moved\.gguf") as caught:
        find_weights(path, resolve(str(path)).config)
    named = first if kind != "exchange" else min(first, second, key=places.__getitem__)
    assert f"{named} is at byte" in str(caught.value) or "rope_freqs.weight" in offsets


@pytest.mark.parametrize(
    ("alignment", "refused"), [(64, None), (8, None), (48, "48 is not a power of two"), (0, "0 is not a power of two")]
)
def test_the_alignment_is_the_files_own(tmp_path, alignment, refused):
    def aligned(writer):
        writer.add_custom_alignment(32 if refused else alignment)

    folder = checkpoints.write(tmp_path / "source", "gqa2")
    config, tensors = LlamaConfig.from_file(folder), checkpoints.tensors("gqa2")
    path = gguf_files.write(tmp_path / "model.gguf", config, tensors, more=aligned)
    key = b"general.alignment" + struct.pack("<I", gguf.GGUFValueType.UINT32)
    path.write_bytes(path.read_bytes().replace(key + struct.pack("<I", 32), key + struct.pack("<I", alignment)))
    if refused is None:
        assert_equal(load(path), load(folder))
        return
    with pytest.raises(ValueError, match=rf"model\.gguf: general\.alignment={refused}"):
        resolve(str(path))


def test_a_tensor_without_dimensions_is_refused(tmp_path):
    path, _, _ = write(tmp_path)
    whole = bytearray(path.read_bytes())
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight")
    path.write_bytes(bytes(whole[:at]) + bytes(4) + bytes(whole[at + 20 :]))
    with pytest.raises(ValueError, match=r"model\.gguf: a tensor has 0 dimensions; from 1 to 4 are read"):
        resolve(str(path))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (lambda writer: writer.add_uint16("split.count", 3), "one of 3 parts: .*00003.gguf.*llama-gguf-split --merge"),
        (lambda writer: writer.add_expert_count(8), r"llama.expert_count=8 is not supported \(only 0\)"),
        (lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)), "unexpected: blk.0.attn_q.b"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path, more, words):
    path, _, _ = write(tmp_path, more=more)
    with pytest.raises(ValueError, match=rf"model\.gguf.*{words}"):
        find_weights(path, resolve(str(path)).config)


def test_another_architecture_is_named(tmp_path):
    path, _, _ = write(tmp_path, architecture="qwen2")
    with pytest.raises(ValueError, match=r"general.architecture='qwen2' is not supported \(only 'llama' is\)"):
        resolve(str(path))


@pytest.fixture
def split(tmp_path):
    """A file in three parts, of which the first has the metadata only, and the same file in one part."""
    path, config, _ = write(tmp_path, "llama3_rope", Type.Q8_0)
    tensors = checkpoints.tensors("llama3_rope")
    more = {"split_max_tensors": 20, "small_first_shard": True}
    gguf_files.write(path, config, tensors, Type.Q8_0, **more)
    return [path.with_name(f"model-0000{n}-of-00003.gguf") for n in (1, 2, 3)], path


def test_a_split_file_is_read_from_its_first_part(split):
    (first, *others), whole = split
    assert not GgufFile._read_one(first).tensors and all(GgufFile._read_one(part).tensors for part in others)
    assert resolve(str(first)).config == resolve(str(whole)).config
    assert_equal(load(first), load(whole))
    assert_equal(load(first, EightBit.INT8, 2), load(whole, EightBit.INT8, 2))
    before = weights_digest(find_weights(first, resolve(str(first)).config))
    others[1].write_bytes(others[1].read_bytes()[:-1] + b"7")
    assert weights_digest(find_weights(first, resolve(str(first)).config)) != before
    others[1].write_bytes(others[1].read_bytes()[:-32])
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.gguf is cut off"):
        find_weights(first, resolve(str(first)).config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parts: parts[1].unlink(), r"one of 3 parts, of which these are missing: model-00002-of-00003\.gguf$"),
        (lambda parts: parts[2].write_bytes(parts[1].read_bytes()), r"00003\.gguf: split\.no=1 is not 2"),
        (lambda parts: parts.reverse(), r"is part 3 of a split file: name its first part, model-00001-of-00003\.gguf"),
        (lambda parts: parts.insert(0, parts[0].rename(parts[0].with_name("m.gguf"))), r"m\.gguf is one of 3 parts: "),
    ],
)
def test_parts_that_are_missing_or_others_are_named(split, change, words):
    parts, _ = split
    change(parts)
    with pytest.raises(ValueError, match=words):
        resolve(str(parts[0]))


def test_missing_metadata_are_named(tmp_path):
    file = GgufFile.read(write(tmp_path)[0])
    kept = {key: value for key, value in file.metadata.items() if "block_count" not in key and "rms" not in key}
    with pytest.raises(ValueError, match=r"it lacks llama.block_count, llama.attention.layer_norm_rms_epsilon"):
        hf_config(dataclasses.replace(file, metadata=kept))


def test_types_that_are_not_read_are_named(tmp_path, monkeypatch):
    def packed(key, rows):
        return (rows.astype(np.float64), Type.F64) if "down" in key else (rows, Type.F32)

    path, _, _ = write(tmp_path, packed=packed)
    text = r"blk.0.ffn_down.weight has type F64, not one of F32, F16, BF16, Q8_0.*; and 2 other faults$"
    monkeypatch.setattr(gguf_tensors, "MOST_FAULTS", 1)
    with pytest.raises(ValueError, match=text):
        find_weights(path, resolve(str(path)).config)


def test_a_folder_with_a_gguf_file_only_and_a_missing_file_are_told_apart(tmp_path):
    path, _, _ = write(tmp_path)
    with pytest.raises(ValueError, match=r"has no config\.json; name a GGUF file in it, such as model\.gguf"):
        resolve(str(tmp_path))
    with pytest.raises(ValueError, match=r"there is no file .*absent\.gguf"):
        resolve(str(path.with_name("absent.gguf")))
    path.rename(path.with_suffix(".bin"))
    with pytest.raises(ValueError, match=r"model\.bin is a file, but no GGUF file"):
        resolve(str(path.with_suffix(".bin")))


# Of log-probabilities down to -8. In bfloat16 and in blocks llama.cpp rounds the activations of every product, too.
LLAMA_CPP_TOLERANCE = {Type.F32: 1e-4, Type.BF16: 0.1, Type.Q8_0: 0.2, Type.Q4_0: 0.2}


@pytest.mark.parametrize("type", LLAMA_CPP_TOLERANCE)
def test_llama_cpp_computes_the_same_of_the_file(tmp_path, type):
    config, tensors = LlamaConfig.from_file(DEMO_FOLDER), load_file(DEMO_FOLDER / "model.safetensors")
    path = gguf_files.write(tmp_path / "demo.gguf", config, tensors, type, tokenizer=DEMO_FOLDER)
    model, tolerance = load_hf(path, resolve(str(path)).config, dtype=jnp.float32), LLAMA_CPP_TOLERANCE[type]
    num_choices = 0
    for golden in json.loads((FOLDER / "llama_cpp.json").read_text())[type.name]:
        prompt, tokens = golden["prompt"], golden["tokens"]
        sequence = np.pad(prompt + tokens, (0, 64 - len(prompt + tokens)))
        logits = dense_logits(model, sequence)[len(prompt) - 1 :][: len(tokens)]
        for ours, chosen, top in zip(np.asarray(jax.nn.log_softmax(logits)), tokens, golden["top"], strict=True):
            for token, theirs in top:
                assert theirs < -8 or abs(ours[token] - theirs) < tolerance, (token, theirs)
            if top[0][1] - top[1][1] > 2 * tolerance:  # no near-tie
                assert ours.argmax() == chosen
                num_choices += 1
    assert num_choices > 40


def test_an_adapter_is_no_model(tmp_path):
    raw, stored = adapters.read(adapters.folder("q_and_v"))
    path = tmp_path / "adapter.gguf"

    def of_base(writer):
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, "Llama 3.1 8B")

    gguf_files.write_adapter(path, adapters.base_config(), stored, alpha=raw["lora_alpha"], more=of_base)
    words = "is an adapter of the model 'Llama 3.1 8B' and no model: serve its model with --enable-lora --lora-modules "
    with pytest.raises(ValueError, match=f"{path} {words}NAME=FILE, or merge the two"):
        resolve(str(path))
