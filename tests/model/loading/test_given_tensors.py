"""Weights that a trainer gives as arrays are those that its files would hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from model.config import LlamaConfig
from model.loading import given_tensors
from model.loading.given_tensors import GivenWeights, moved
from model.loading.weights import load_hf
from model.network.packed import pack_for_tpu, packer
from model.network.sharding import abstract_model, make_mesh
from model.quantization.forms import EightBit, FourBit, MixedForms, Rounding, ScaleFormat
from tests.model import checkpoints
from tests.model.given import loaded
from tests.model.loaded import flat
from tests.model.loading.test_weights import config_of

NOTHING = {"dtype": "float32", "mesh": None, "quantization": None, "rounding": None}
FORMS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": EightBit.INT8},
    "fp8": {"dtype": "float32", "quantization": EightBit.FP8},
    "int4": {"dtype": "float32", "quantization": FourBit(group=16)},
    "nvfp4": {"dtype": "bfloat16", "quantization": FourBit(group=16, numbers=ScaleFormat.NVFP4)},
    "mixed": {
        "dtype": "float32",
        "quantization": MixedForms(
            most=FourBit(group=16, numbers=ScaleFormat.Q4_1),
            others=(("layers.0.attention.qkv.v_proj", EightBit.INT8), ("layers.1.mlp.down", EightBit.INT8)),
        ),
    },
}


def whole(array: np.ndarray) -> jax.Array:
    """On the first device."""
    return jax.device_put(array, jax.devices()[0])


def spread(array: np.ndarray) -> jax.Array:
    """A trainer's array in parts on all eight devices, in an order of its own."""
    mesh = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("fsdp", "tp"))
    parts = P("fsdp", "tp") if array.ndim == 2 else P()
    return jax.device_put(array, NamedSharding(mesh, parts))


def explicit(array: np.ndarray) -> jax.Array:
    """In parts on the first four devices, in a mesh whose axes are part of the array's type."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",), axis_types=(AxisType.Explicit,))
    return jax.device_put(array, NamedSharding(mesh, P("fsdp")))


@contextmanager
def no_host() -> Iterator[None]:
    """No array of JAX may be read by the host."""

    def value(self: jax.Array) -> np.ndarray:
        raise AssertionError("an array has come to the host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(jnp.zeros(())), "_value", property(value))
        yield


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        x.dtype == y.dtype and np.array_equal(x.astype(np.float32), y.astype(np.float32))
        for x, y in ((one[name], other[name]) for name in one)
    )


@pytest.mark.parametrize(
    ("variant", "form"),
    [
        *(("gqa2", form) for form in FORMS),
        ("tied", "bfloat16"),
        ("tied", "int4"),
        ("bf16", "float32"),
        ("bf16", "int8"),
    ],
)
def test_arrays_make_the_parameters_that_their_files_make(variant, form, tmp_path):
    folder = checkpoints.write(tmp_path, variant)
    config = LlamaConfig.from_file(folder)
    expected = flat(load_hf(folder, config, **FORMS[form]))
    for place in (np.asarray, whole):
        arrays = {name: place(array) for name, array in checkpoints.tensors(variant).items()}
        assert same(flat(loaded(GivenWeights(arrays, config), **FORMS[form])), expected)


def test_the_host_is_seen_where_parts_are_cut_in_another_way():
    array = spread(np.ones((8, 8), np.float32))
    chips = NamedSharding(make_mesh(2), P("tensor"))
    with no_host(), pytest.raises(AssertionError, match="has come to the host"):
        jax.device_put(array, chips)
    with no_host():
        assert moved(array, chips).sharding == chips


@pytest.mark.parametrize(
    ("names", "chips", "form"),
    [("hf", 1, "float32"), ("hf", 2, "int8"), ("hf", 4, "float32")]
    + [("own", 1, "int8"), ("own", 2, "float32"), ("own", 4, "int8")],
)
def test_arrays_go_from_any_devices_to_the_chips_without_the_host(names, chips, form, tmp_path):
    """With four chips each KV head is on two of them."""
    folder = checkpoints.write(tmp_path, "gqa2")
    config = LlamaConfig.from_file(folder)
    asked = FORMS[form] | {"mesh": make_mesh(chips) if chips > 1 else None}
    expected = load_hf(folder, config, **asked)
    arrays = checkpoints.tensors("gqa2") if names == "hf" else flat(load_hf(folder, config, dtype="float32"))
    for place in (whole, spread, explicit):
        given = GivenWeights({name: place(array) for name, array in arrays.items()}, config, names=names)
        given.check(NOTHING)
        with no_host():
            model = loaded(given, **asked)
        assert same(flat(model), flat(expected))
        placed = [[leaf.sharding for leaf in jax.tree.leaves(nnx.state(x))] for x in (model, expected)]
        assert placed[0] == placed[1]


def nested(model) -> dict:
    """The model's state as plain dicts and lists, as a trainer in plain JAX has it."""
    state = nnx.to_pure_dict(nnx.state(model))
    return state | {"layers": [state["layers"][number] for number in sorted(state["layers"])]}


@pytest.mark.parametrize("variant", ["gqa2", "tied"])
@pytest.mark.parametrize(
    "tree",
    [
        lambda model: model,
        nnx.state,
        nested,
        lambda model: flat(model),
        lambda model: dict(nnx.to_flat_state(nnx.state(model))),
    ],
)
def test_a_model_of_ours_is_given_as_it_is(variant, tree, tmp_path):
    folder = checkpoints.write(tmp_path, variant)
    config = LlamaConfig.from_file(folder)
    trained = load_hf(folder, config, dtype="float32")
    given = tree(trained)
    for form in ("bfloat16", "int8"):
        model = loaded(GivenWeights(given, config, names="own"), **FORMS[form])
        assert same(flat(model), flat(load_hf(folder, config, **FORMS[form])))


def problems_of(arrays: dict, config: LlamaConfig, **options) -> str:
    with pytest.raises(ValueError, match="the arrays are not this model's weights: ") as error:
        GivenWeights(arrays, config, **options).check(NOTHING)
    return str(error.value)


def test_everything_wrong_is_named_in_one_error(tmp_path):
    config = config_of("gqa2", tmp_path)
    given: dict = {name: whole(array) for name, array in checkpoints.tensors("gqa2").items()}
    layer = "model.layers.{}.{}.weight".format
    del given["model.norm.weight"]
    for number in (0, 2):
        del given[layer(number, "mlp.up_proj")]
    given["model.layers.1.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    given["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)  # of older exporters
    given[layer(1, "self_attn.k_proj")] = np.zeros((16, 64), np.float32)
    given[layer(1, "mlp.down_proj")] = np.zeros((64, 160), np.int8)
    given[layer(0, "mlp.down_proj")] = np.zeros((64, 160), np.float64)
    given[layer(0, "self_attn.v_proj")] = "zeros"
    given["lm_head.weight"] = np.zeros((200, 64), np.float32)
    given["model.embed_tokens.weight"].delete()
    nan, large = (np.zeros((64, 64), np.float32) for _ in range(2))
    nan[63, 63], large[0, 5] = np.nan, np.finfo(np.float32).max
    given |= {layer(0, "self_attn.q_proj"): nan, layer(1, "self_attn.q_proj"): whole(large)}
    given[layer(2, "self_attn.q_proj")] = whole(np.full((64, 64), -np.inf, ml_dtypes.bfloat16))
    message = problems_of(given, config)
    assert "missing: model.layers.{0,2}.mlp.up_proj.weight, model.norm.weight;" in message
    assert "unexpected: model.layers.{1}.self_attn.q_proj.bias;" in message
    assert "model.layers.{1}.self_attn.k_proj.weight has shape (16, 64), not (32, 64)" in message
    assert "model.layers.{1}.mlp.down_proj.weight has type int8, not one of bfloat16, float16, float32" in message
    assert "model.layers.{0}.mlp.down_proj.weight has type float64" in message
    assert "model.layers.{0}.self_attn.v_proj.weight is a str and no array" in message
    assert "lm_head.weight has shape (200, 64), not (192, 64): the vocabulary has 192 tokens" in message
    assert "model.embed_tokens.weight has been deleted" in message
    assert "model.layers.{0,1,2}.self_attn.q_proj.weight is not finite, or too large for bfloat16" in message
    assert len(message.splitlines()) == 1


def test_values_are_found_in_every_part_of_an_array_of_numpy(tmp_path, monkeypatch):
    monkeypatch.setattr(given_tensors, "_BYTES_AT_ONCE", 1000)  # three rows
    config = config_of("gqa2", tmp_path)
    for row in (0, 100, 191):
        given = checkpoints.tensors("gqa2")
        given["lm_head.weight"] = given["lm_head.weight"].copy()
        given["lm_head.weight"][row, 7] = np.inf
        assert problems_of(given, config).endswith("lm_head.weight is not finite, or too large for bfloat16")


@pytest.mark.parametrize("place", [np.asarray, whole, spread])
def test_a_tied_head_may_be_given_alone_or_equal_to_the_embedding(place, tmp_path):
    folder = checkpoints.write(tmp_path, "tied")
    config = LlamaConfig.from_file(folder)
    expected = {form: flat(load_hf(folder, config, **FORMS[form])) for form in ("float32", "int8")}
    given = checkpoints.tensors("tied")
    embedding = given.pop("model.embed_tokens.weight")
    both = {"model.embed_tokens.weight": place(embedding), "lm_head.weight": place(embedding)}
    for names in (["lm_head.weight"], ["model.embed_tokens.weight"], [*both]):
        for form, values in expected.items():
            model = loaded(GivenWeights(given | {name: both[name] for name in names}, config), **FORMS[form])
            assert same(flat(model), values)
    changed = embedding.copy()
    changed[-1, 3] += 1
    message = problems_of(given | both | {"lm_head.weight": place(changed)}, config)
    assert message.endswith("lm_head.weight differs from the embedding, and the model ties them")
    assert "missing: model.embed_tokens.weight" in problems_of(given, config)


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("names", ["hf", "own"])
def test_arrays_are_deleted_as_they_are_used_if_they_are_donated(names, form, tmp_path):
    folder = checkpoints.write(tmp_path, "tied")
    config = LlamaConfig.from_file(folder)

    def arrays() -> dict[str, jax.Array]:
        given = checkpoints.tensors("tied") if names == "hf" else flat(load_hf(folder, config, dtype="float32"))
        return {name: whole(array) for name, array in given.items()}

    expected, kept, donated = flat(load_hf(folder, config, **FORMS[form])), arrays(), arrays()
    model = loaded(GivenWeights(kept, config, names=names), **FORMS[form])
    assert same(flat(model), expected)
    for leaf in jax.tree.leaves(nnx.state(model)):
        leaf.delete()
    assert same(
        {name: np.asarray(array) for name, array in kept.items()}, {n: np.asarray(a) for n, a in arrays().items()}
    )
    left = []
    given = GivenWeights(donated, config, names=names, donate=True)
    made = {}
    for module, values in given.modules(NOTHING | FORMS[form]):
        left.append(sum(not array.is_deleted() for array in donated.values()))
        made |= {f"{module}.{name}" if module else name: np.asarray(value) for name, value in values.items()}
    assert same(made, expected)
    assert all(array.is_deleted() for array in donated.values())
    assert left[0] == len(donated) and left == sorted(left, reverse=True) and left[-1] <= len(donated) / 3


def test_a_form_with_stored_scales_of_inputs_is_refused(tmp_path):
    config = config_of("gqa2", tmp_path)
    given = GivenWeights(checkpoints.tensors("gqa2"), config)
    with pytest.raises(ValueError, match="start the engine with a checkpoint that is not quantised"):
        loaded(given, dtype="float32", quantization=EightBit.INT8, rounding=Rounding(is_static=True))


def test_a_model_with_zeros_gets_zeros_of_0(tmp_path):
    config = config_of("gqa2", tmp_path)
    form = {"dtype": "float32", "quantization": FourBit(group=16, has_zeros=True)}
    without = {"dtype": "float32", "quantization": FourBit(group=16)}
    values = flat(loaded(GivenWeights(checkpoints.tensors("gqa2"), config), **form))
    zeros = {name: values.pop(name) for name in [*values] if name.endswith(".zero")}
    assert len(zeros) == 4 * config.num_layers and not any(map(np.any, zeros.values()))
    assert same(values, flat(load_hf(tmp_path / "config", config, **without)))


@pytest.mark.parametrize("chips", [1, 2])
def test_modules_are_packed_one_by_one_as_a_whole_model_is(chips, tmp_path):
    """In the form of TPUs."""
    config = config_of("gqa2", tmp_path)
    form = NOTHING | FORMS["int4"] | {"mesh": make_mesh(chips) if chips > 1 else None}
    planned = pack_for_tpu(abstract_model(config, **form), form["mesh"], interpret=True)
    packed, made = packer(planned), {}
    given = GivenWeights(checkpoints.tensors("gqa2"), config)
    for module, values in given.modules(form):
        made |= {f"{module}.{name}" if module else name: value for name, value in packed(module, values).items()}
    expected = pack_for_tpu(loaded(given, **form), form["mesh"], interpret=True)
    assert same({name: np.asarray(value) for name, value in made.items()}, flat(expected))
    for path, like in nnx.to_flat_state(nnx.state(planned)):
        assert made[".".join(map(str, path))].sharding == like.get_value().sharding
