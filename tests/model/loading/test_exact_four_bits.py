"""Projections in 4 and 6 bits with the numbers of their files, as CPUs read them. GGUF files may mix their types."""

from __future__ import annotations

import dataclasses

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from model.config import LlamaConfig
from model.loading.hf_format import expected_shapes
from model.loading.source import resolve
from model.loading.stored_weights import find_weights
from model.loading.weights import load_hf
from model.network.linear import Linear, linear_method
from model.network.packed import pack_for_cpu
from model.network.six_bit import joined
from model.quantization.forms import EightBit, FourBit, MixedForms, Rounding, ScaleFormat, SixBit
from pallas_kernels.cpu import library
from scripts.convert_checkpoint import convert
from tests.c_compiler import NATIVE, compiler
from tests.model import checkpoints, gguf_blocks, gguf_files
from tests.model.dense_attention import dense_logits
from tests.model.gguf_files import Type
from tests.model.loaded import assert_equal, flat
from tests.model.loading.test_gguf import HALVES, random_blocks
from tests.model.loading.test_packed_checkpoints import FORMATS, write

pytestmark = pytest.mark.slow

F16, BF16, Q4_0 = ScaleFormat.FLOAT16, ScaleFormat.BFLOAT16, FourBit(group=32, numbers=ScaleFormat.FLOAT16)
Q4_1, Q4_K = FourBit(group=32, numbers=ScaleFormat.Q4_1), FourBit(group=32, numbers=ScaleFormat.Q4_K)
Q6_K = SixBit()


@pytest.fixture(scope="module", autouse=True)
def native():
    compiler()
    library.load(NATIVE)


def load(path, form, rounding=None):
    source = resolve(str(path))
    return load_hf(source.path, source.config, dtype=jnp.float32, quantization=form, rounding=rounding)


def exact_model(path, model):
    """The file's weights in float32, except for those that `model` has in int8."""
    exact = load(path, None)
    if model.head.method.form is EightBit.INT8:
        exact.head = model.head
    wanted = dict(nnx.iter_graph(exact))
    for name, linear in nnx.iter_graph(model):
        if isinstance(linear, Linear) and linear.method.form is EightBit.INT8 and linear is not model.head:
            values = linear.kernel[...].astype(jnp.float32) * linear.scale[...][:, None]
            if name in wanted:
                wanted[name].kernel.set_value(values)
                continue
            fused, rows = wanted[name[:-1]].kernel, rows_of(model.config, name[-1])
            fused.set_value(fused[...].at[rows].set(values))
    return exact


def rows_of(config, name):
    """Of a tensor, in its fused projection."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    first = {
        "q_proj": 0,
        "k_proj": queries,
        "v_proj": queries + keys,
        "gate_proj": 0,
        "up_proj": config.intermediate_size,
    }
    return slice(
        first[name],
        first[name] + {"q_proj": queries, "k_proj": keys, "v_proj": keys}.get(name, config.intermediate_size),
    )


def assert_logits_are_exact(path, form):
    """Of XLA's products and of those in C."""
    model = load(path, form)
    tokens = np.arange(9) % model.config.vocab_size
    expected = np.asarray(dense_logits(exact_model(path, model), tokens))
    for found in (dense_logits(model, tokens), dense_logits(pack_for_cpu(model), tokens)):
        np.testing.assert_allclose(np.asarray(found), expected, atol=2e-4 * np.abs(expected).max())
    kernels = {linear.kernel.ndim for _, linear in nnx.iter_graph(model) if isinstance(linear, Linear)}
    assert kernels == {3}


@pytest.mark.parametrize(
    ("name", "group", "in_bfloat16", "form"),
    [
        ("gptq sym", 32, False, FourBit(group=32, numbers=F16)),
        ("gptq", 32, False, FourBit(group=32, numbers=F16, has_zeros=True)),
        ("awq", 32, False, FourBit(group=32, numbers=F16, has_zeros=True)),
        ("compressed-tensors", -1, True, FourBit(group=32, numbers=BF16, has_zeros=True)),
        ("compressed-tensors sym", 32, True, FourBit(group=32)),
    ],
)
def test_packed_weights_keep_their_scales_and_zeros(tmp_path, name, group, in_bfloat16, form):
    tensors, _ = write(tmp_path, FORMATS[name], group=group, in_bfloat16=in_bfloat16)
    if in_bfloat16:
        narrow = {key: value.astype(ml_dtypes.bfloat16) for key, value in tensors.items() if key.endswith("_scale")}
        checkpoints.write_tensors(tmp_path, tensors | narrow)
    stored = find_weights(tmp_path, LlamaConfig.from_file(tmp_path))
    assert stored.exact_form == form
    assert_logits_are_exact(tmp_path, form)


def write_gguf(folder, type_of, tokenizer=None, **others):
    """A file of blocks of the types that `type_of` gives for a tensor's name, with weights around zero."""
    source = checkpoints.write(folder / "source", "gqa2")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_layers": 2, "vocab_size": 96} | others
    config = dataclasses.replace(LlamaConfig.from_file(source), **sizes)
    rng = np.random.default_rng(0)

    def packed(key, rows):
        type = type_of(key)
        if type not in HALVES:
            return gguf.quants.quantize(np.ascontiguousarray(rows), type), type
        blocks = random_blocks(rng, rows.shape, type).reshape(*rows.shape[:1], -1, gguf.GGML_QUANT_SIZES[type][1])
        first, *second = HALVES[type]
        unit = rng.uniform(1e-5, 5e-5, blocks.shape[:2]) * (500 if type is Type.Q4_1 else 1)
        of_minimum = unit * 7.5 * (-1 if type is Type.Q4_1 else 1)
        for place, values in zip((first, *second), (unit, of_minimum), strict=False):
            blocks[:, :, place : place + 2] = values.astype(np.float16)[:, :, None].view(np.uint8)
        return blocks.reshape(rows.shape[0], -1), type

    wide = {
        key: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.05, shape).astype(np.float32)
        for key, shape in expected_shapes(config).items()
    }
    return gguf_files.write(folder / "model.gguf", config, wide, packed=packed, tokenizer=tokenizer)


def as_llama_quantize(key):
    """Some of the types of Q4_K_M: those of values and of the second products of the MLP vary from layer to layer."""
    is_finer = ("v_proj" in key and "layers.0" in key) or ("down_proj" in key and "layers.1" in key)
    return Type.Q6_K if is_finer or "lm_head" in key or "embed" in key else Type.Q4_K


def with_importance(key):
    return Type.Q4_1 if "layers.0.mlp.down" in key else Type.Q4_0


def with_other_types(key):
    """The parts of fused projections differ in all ways, and some tensors have types that are not kept."""
    of = {"layers.0.self_attn.k": Type.Q8_0, "layers.0.self_attn.v": Type.Q6_K, "layers.0.mlp.up": Type.Q4_1}
    of |= {"layers.1.self_attn.q": Type.Q5_K, "layers.1.self_attn.v": Type.Q5_K, "layers.1.mlp.down": Type.Q5_K}
    of |= {"layers.1.self_attn.k": Type.Q8_0}
    return next((type for part, type in of.items() if part in key), Type.Q6_K if "layers.1.mlp" in key else Type.Q4_K)


Q4_K_M = MixedForms(
    most=Q4_K, others=(("head", Q6_K), ("layers.0.attention.qkv.v_proj", Q6_K), ("layers.1.mlp.down", Q6_K))
)
OTHER_TYPES = MixedForms(
    most=Q4_K,
    others=(
        ("head", Q4_K),
        ("layers.0.attention.qkv.k_proj", EightBit.INT8),
        ("layers.0.attention.qkv.v_proj", Q6_K),
        ("layers.0.mlp.gate_up.up_proj", Q4_1),
        ("layers.1.attention.qkv", EightBit.INT8),
        ("layers.1.mlp.down", EightBit.INT8),
        ("layers.1.mlp.gate_up", Q6_K),
    ),
)


def with_head(form):
    return MixedForms(most=form, others=(("head", form),))


@pytest.mark.parametrize(
    ("type_of", "form"),
    [
        (lambda key: Type.Q8_0 if "head" in key or "embed" in key else Type.Q4_0, Q4_0),
        (lambda _: Type.Q4_1, with_head(Q4_1)),
        (lambda _: Type.Q4_K, with_head(Q4_K)),
        (lambda _: Type.Q6_K, Q6_K),
        (
            lambda key: Type.Q8_0 if "head" in key or "embed" in key else Type.Q6_K,
            MixedForms(most=Q6_K, others=(("head", EightBit.INT8),)),
        ),
        (with_importance, MixedForms(most=Q4_0, others=(("head", Q4_0), ("layers.0.mlp.down", Q4_1)))),
        (as_llama_quantize, Q4_K_M),
        (with_other_types, OTHER_TYPES),
    ],
    ids=["Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q6_K and Q8_0", "Q4_0 and Q4_1", "Q4_K_M", "others"],
)
def test_each_projection_of_a_gguf_keeps_its_numbers(tmp_path, type_of, form):
    path = write_gguf(tmp_path, type_of)
    stored = find_weights(path, resolve(str(path)).config)
    assert (stored.exact_form, stored.quantization) == (form, EightBit.INT8)
    assert_logits_are_exact(path, form)


def test_a_gguf_without_4_or_6_bits_has_no_such_form_and_needs_no_reason(tmp_path):
    path = write_gguf(tmp_path, lambda _: Type.Q8_0)
    stored = find_weights(path, resolve(str(path)).config)
    assert (stored.exact_form, stored.four_bit, stored.four_bit_fault) == (None, None, None)


def test_a_head_whose_outputs_are_no_whole_panels_is_in_int8(tmp_path):
    """XLA would write it in float32 at every step."""
    path = write_gguf(tmp_path, as_llama_quantize, vocab_size=100)
    form = find_weights(path, resolve(str(path)).config).exact_form
    assert (form.in_head, form.at("layers.1.mlp.down")) == (EightBit.INT8, Q6_K)


def test_kernels_in_6_bits_are_those_of_the_file(tmp_path):
    """In float64, value by value as the format says; also in C, of inputs that pick out single weights."""
    path = write_gguf(tmp_path, lambda _: Type.Q6_K)
    model = load(path, Q6_K)
    down = model.layers[1].mlp.down
    stored = next(x for x in gguf.GGUFReader(path).tensors if x.name == "blk.1.ffn_down.weight").data
    blocks = stored.reshape(-1, gguf.GGML_QUANT_SIZES[Type.Q6_K][1])
    expected = np.array([gguf_blocks.q6_k(bytes(block)) for block in blocks], np.float64).reshape(stored.shape[0], -1)
    kernel = np.asarray(joined(down.kernel[...], down.kernel_upper[...]), np.float64)
    scale, unit = (np.asarray(x[...], np.float64) for x in (down.scale, down.scale_unit))
    made = kernel * np.repeat(scale, 16, axis=1) * np.repeat(unit, 256, axis=1)
    np.testing.assert_array_equal(made, expected)
    picked = np.asarray(pack_for_cpu(model).layers[1].mlp.down(jnp.eye(512)))
    np.testing.assert_array_equal(picked.T.astype(np.float64), expected)


def test_rounded_inputs_cost_what_int8_costs(tmp_path):
    """And a packed model rounds as one that XLA computes."""
    path = write_gguf(tmp_path, as_llama_quantize)
    tokens = np.arange(9)
    exact, rounded = load(path, Q4_K_M), load(path, Q4_K_M, Rounding())
    expected, by_xla = (np.asarray(dense_logits(model, tokens)) for model in (exact, rounded))
    in_c = np.asarray(dense_logits(pack_for_cpu(rounded), tokens))
    size = np.abs(expected).max()
    assert 1e-5 * size < np.abs(in_c - expected).max() < 2e-2 * size
    assert np.abs(in_c - by_xla).max() < 1e-2 * size


FORMS = [
    *(FourBit(group=128, numbers=numbers, has_zeros=True) for numbers in (ScaleFormat.CHIP, F16, ScaleFormat.FLOAT32)),
    FourBit(group=32, numbers=F16), FourBit(group=64, numbers=BF16, has_zeros=True), Q4_1, Q4_K,
]  # fmt: skip


def numbers_of(form):
    """Parameters of a kernel [64, 512], and its weights in float64."""
    rng = np.random.default_rng(0)
    weights = linear_method(form).quantize(jnp.asarray(rng.normal(0.3, 1, (64, 512)), jnp.float32))
    if form.has_zeros:
        like = weights["zero"]
        weights["zero"] = jnp.asarray(rng.integers(*((0, 17) if like.dtype == jnp.uint8 else (-8, 9)), like.shape))
        weights["zero"] = weights["zero"].astype(like.dtype)
    wide = {name: np.asarray(value.astype(jnp.float32), np.float64) for name, value in weights.items()}
    values = wide["kernel"].reshape(64, -1, form.group)
    for name in ("scale", "offset"):
        if f"{name}_unit" in wide:
            wide[name] = wide[name] * np.repeat(wide[f"{name}_unit"], 8, axis=1)
    if "offset" in wide:
        made = (values + 8) * wide["scale"][:, :, None] - wide["offset"][:, :, None]
    else:
        zero = wide.get("zero", np.zeros(wide["scale"].shape)) - (8 if form.numbers is not ScaleFormat.CHIP else 0)
        zero = zero if form.has_zeros else np.zeros(wide["scale"].shape)
        made = (values - zero[:, :, None]) * wide["scale"][:, :, None]
    return weights, made.reshape(64, 512)


def rounded_to_int8(inputs):
    """Each block of 256 with its own scale, in float32 as the C code computes it; the products in float64."""
    blocks = inputs.reshape(inputs.shape[0], -1, 256)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    steps = np.rint(blocks * (np.float32(127) / largest))
    return (steps.astype(np.float64) * (largest * np.float32(1 / 127))).reshape(inputs.shape)


@pytest.mark.parametrize("rounding", [None, Rounding()])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_are_those_of_the_stored_numbers(form, rounding):
    weights, exact = numbers_of(form)
    method = linear_method(form, rounding)
    inputs = np.random.default_rng(1).normal(0, 1, (5, 512)).astype(np.float32)
    used = inputs if rounding is None else rounded_to_int8(inputs)
    expected, size = used @ exact.T, np.abs(used) @ np.abs(exact.T)
    packed = {name: method.pack(name, value) for name, value in weights.items()}
    in_c = np.asarray(method.apply(inputs, packed, jnp.float32))
    for found in (in_c, np.asarray(method.apply(inputs, weights, jnp.float32))):
        assert (np.abs(found - expected) <= 2e-5 * size).all()
    alone = np.asarray(method.apply(inputs[3:4], packed, jnp.float32))
    np.testing.assert_array_equal(alone[0], in_c[3])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("awq", "int4, groups of 32 with float16 scales and zero points, and the head is int8, kept from AWQ int4"),
        (
            "Q4_K_M",
            "int4, groups of 32 as in Q4_K (2 in int6, groups of 16 as in Q6_K), and the head is "
            "int6, groups of 16 as in Q6_K, kept from GGUF Q4_K and Q6_K",
        ),
    ],
)
def test_a_conversion_holds_the_same_bits(tmp_path, capsys, monkeypatch, name, said):
    if name == "awq":
        write(tmp_path / "source", FORMATS["awq"])
        path = tmp_path / "source"
    else:
        path = write_gguf(tmp_path, as_llama_quantize)
    out, source = tmp_path / "out", resolve(str(path))
    monkeypatch.setattr("scripts.convert_checkpoint._small_files", lambda source: (source.config.to_hf(), {}))
    convert(source, source.weights, out, dtype="float32", quantization="int4-exact")
    assert said in capsys.readouterr().out
    stored = find_weights(out, LlamaConfig.from_file(out))
    form = find_weights(path, source.config).exact_form
    assert stored.quantization == form
    assert_equal(flat(stored.load(dtype=jnp.float32, quantization=form)), flat(load(path, form)))
