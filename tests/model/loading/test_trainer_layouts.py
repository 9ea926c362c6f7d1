"""Trees as Tunix and MaxText have them, computed in their own way by NumPy, and by the model that is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from model.config import LlamaConfig
from model.loading import given_tensors
from model.loading.given_tensors import GivenWeights
from tests.model.dense_attention import dense_logits
from tests.model.driver import TINY
from tests.model.given import loaded
from tests.model.loading.test_given_tensors import NOTHING

TOKENS = np.random.default_rng(1).integers(TINY.vocab_size, size=24, dtype=np.int32)
D, F, N, K, H, L = (
    TINY.hidden_size, TINY.intermediate_size, TINY.num_heads, TINY.num_kv_heads, TINY.head_dim, TINY.num_layers
)  # fmt: skip
# Of a layer, in the order in which `logits` takes them: the first norm, queries, keys, values, output, the second norm,
# gate, up, down.
SHAPES = ((D,), (D, N, H), (D, K, H), (D, K, H), (N, H, D), (D,), (D, F), (D, F), (F, D))
TUNIX = (
    "input_layernorm.w", "attn.q_proj.w", "attn.k_proj.w", "attn.v_proj.w", "attn.o_proj.w",
    "post_attention_layernorm.w", "mlp.gate_proj.kernel", "mlp.up_proj.kernel", "mlp.down_proj.kernel",
)  # fmt: skip
MAXTEXT = (
    "pre_self_attention_layer_norm.scale", "self_attention.query.kernel", "self_attention.key.kernel",
    "self_attention.value.kernel", "self_attention.out.kernel", "post_self_attention_layer_norm.scale",
    "mlp.wi_0.kernel", "mlp.wi_1.kernel", "mlp.wo.kernel",
)  # fmt: skip
Rotate = Callable[[np.ndarray], np.ndarray]


def angles() -> np.ndarray:
    """[T, 1, H / 2]"""
    frequencies = TINY.rope_theta ** (-np.arange(0, H, 2) / H)
    return (np.arange(len(TOKENS))[:, None] * frequencies)[:, None]


def rotate_halves(x: np.ndarray) -> np.ndarray:
    """Tunix's: element i of a head [T, N, H] turns with element i + H / 2."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles()), np.sin(angles())
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rotate_neighbours(x: np.ndarray) -> np.ndarray:
    """MaxText's for Llama: elements 2i and 2i + 1 are one complex number."""
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles())
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + TINY.rms_norm_eps) * scale


def logits(top: list[np.ndarray], layers: list[list[np.ndarray]], rotate: Rotate, factor: float) -> np.ndarray:
    """[T, V] in float64. `factor`: of the scores."""
    embedding, last_norm, head = top
    x = embedding[TOKENS]
    for before, q, k, v, out, after, gate, up, down in layers:
        heads = [np.einsum("td,dnh->tnh", norm(x, before), kernel) for kernel in (q, k, v)]
        queries, keys, values = rotate(heads[0]), rotate(heads[1]), heads[2]
        groups = queries.reshape(len(x), K, N // K, H)
        scores = np.einsum("tkgh,skh->kgts", groups, keys) * factor
        weights = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("kgts,skh->tkgh", weights, values).reshape(len(x), N, H)
        x = x + np.einsum("tnh,nhd->td", attended, out)
        hidden = norm(x, after)
        gated = hidden @ gate
        x = x + (gated / (1 + np.exp(-gated)) * (hidden @ up)) @ down
    return norm(x, last_norm) @ head


def drawn(*, is_tied: bool = False) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Random arrays: [embedding, norm, head [D, V]], and those of each layer."""
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        values = rng.normal(size=shape) * 0.3 if len(shape) > 1 else 1 + rng.normal(size=shape) * 0.2
        return values.astype(np.float32)

    embedding = draw((TINY.vocab_size, D))
    head = embedding.T if is_tied else draw((D, TINY.vocab_size))
    return [embedding, draw((D,)), head], [[draw(shape) for shape in SHAPES] for _ in range(L)]


def tree_of(flat: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts of dotted paths."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def check(tree: Any, names: str, expected: np.ndarray, config: LlamaConfig = TINY) -> None:
    given = GivenWeights(tree, config, names=names)
    found = np.asarray(dense_logits(loaded(given, dtype="float32"), TOKENS))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def tunix_tree(top: list[np.ndarray], layers: list[list[np.ndarray]]) -> dict[str, np.ndarray]:
    flat = dict(zip(("embedder.input_embedding", "final_norm.w", "lm_head.w"), top, strict=True))
    for number, arrays in enumerate(layers):
        flat |= {f"layers.{number}.{name}": array for name, array in zip(TUNIX, arrays, strict=True)}
    return flat


def maxtext_tree(top: list[np.ndarray], layers: list[list[np.ndarray]], *, is_scanned: bool) -> dict[str, np.ndarray]:
    names = ("token_embedder.embedding", "decoder.decoder_norm.scale", "decoder.logits_dense.kernel")
    flat = dict(zip(names, top, strict=True))
    if is_scanned:
        stacked = [np.stack(arrays, axis=1) for arrays in zip(*layers, strict=True)]
        return flat | {f"decoder.layers.{name}": array for name, array in zip(MAXTEXT, stacked, strict=True)}
    for number, arrays in enumerate(layers):
        flat |= {f"decoder.layers_{number}.{name}": array for name, array in zip(MAXTEXT, arrays, strict=True)}
    return flat


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_a_tree_of_tunix(place):
    top, layers = drawn()
    expected = logits(top, layers, rotate_halves, H**-0.5)
    flat = {name: place(array) for name, array in tunix_tree(top, layers).items()}
    check(flat, "tunix", expected)
    state = nnx.State(tree_of({name: nnx.Param(array) for name, array in flat.items()}))
    state["rngs"] = {"params": {"key": nnx.RngKey(jax.random.key(0))}}  # as a model with dropout has it
    check(state, "tunix", expected)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_tree_of_maxtext(is_scanned, place):
    """Its scores have no factor."""
    top, layers = drawn()
    expected = logits(top, layers, rotate_neighbours, 1.0)
    flat = {name: place(array) for name, array in maxtext_tree(top, layers, is_scanned=is_scanned).items()}
    check({"params": tree_of(flat)}, "maxtext", expected)
    check({"params": {"params": tree_of(flat)}}, "maxtext", expected)  # of a train state
    check({f"base.{path}": array for path, array in flat.items()}, "maxtext", expected)
    boxed = {path: nn.LogicallyPartitioned(array, (None,) * array.ndim) for path, array in flat.items()}
    check(tree_of(boxed), "maxtext", expected)


@pytest.mark.parametrize("names", ["tunix", "maxtext"])
def test_a_tied_tree_has_no_head(names):
    top, layers = drawn(is_tied=True)
    if names == "tunix":
        flat, expected = tunix_tree(top, layers), logits(top, layers, rotate_halves, H**-0.5)
        del flat["lm_head.w"]
    else:
        flat, expected = maxtext_tree(top, layers, is_scanned=True), logits(top, layers, rotate_neighbours, 1.0)
        del flat["decoder.logits_dense.kernel"]
    check(flat, names, expected, replace(TINY, tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"missing: (lm_head\.w|decoder\.logits_dense\.kernel)$"):
        check(flat, names, expected)


def test_the_layers_of_one_array_share_programs_and_end_together():
    top, layers = drawn()
    flat = {name: jnp.asarray(array) for name, array in maxtext_tree(top, layers, is_scanned=True).items()}
    given_tensors._cut_on_devices.clear_cache()
    for _ in GivenWeights(flat, TINY, names="maxtext", donate=True).modules(NOTHING):
        pass
    # The head's, the two norms', those of gate and up, and of each other kernel its own.
    assert given_tensors._cut_on_devices._cache_size() == 8
    assert all(array.is_deleted() for array in flat.values())


def test_what_is_wrong_is_named_as_the_trainer_names_it():
    flat = maxtext_tree(*drawn(), is_scanned=False)
    flat["decoder.layers_1.mlp.wo.kernel"] = flat["decoder.layers_1.mlp.wo.kernel"].T
    del flat["decoder.layers_0.self_attention.key.kernel"], flat["decoder.layers_1.self_attention.key.kernel"]
    flat["decoder.layers_0.self_attention.query.bias"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="weights: ") as error:
        check(flat, "maxtext", np.zeros(()))
    assert "missing: decoder.layers_{0,1}.self_attention.key.kernel;" in str(error.value)
    assert "unexpected: decoder.layers_{0}.self_attention.query.bias;" in str(error.value)
    assert f"decoder.layers_{{1}}.mlp.wo.kernel has shape {(D, F)}, not {(F, D)}" in str(error.value)
