"""Which stages of a model have bits that depend on the number of rows, compiled as for users: `python row_bits.py`.

Prints for every form of weights and several numbers of rows up to 64 the stages of one token whose bits are not those
of the token alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.compiling.compiler_options import compiler_options
from model.loading.weights import random_weights
from model.network.llama import Llama
from model.network.packed import pack_for_cpu
from model.quantization.forms import EightBit, FourBit, Rounding, ScaleFormat
from model.sampling.logprobs import logprobs
from model.sampling.sampling import most_likely, tempered_weights
from model.sampling.vocab_split import VocabShard
from pallas_kernels.cpu import library
from tests.c_compiler import NATIVE
from tests.model.driver import TINY

CONFIG = replace(
    TINY, hidden_size=224, intermediate_size=352, vocab_size=1056, num_heads=6, num_kv_heads=2, head_dim=48
)
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": jnp.float32},
    "bfloat16": {"dtype": jnp.bfloat16},
    "int8 weights": {"dtype": jnp.float32, "quantization": EightBit.INT8},
    "int8": {"dtype": jnp.float32, "quantization": EightBit.INT8, "rounding": Rounding(with_head=True)},
    "int4 weights": {"dtype": jnp.float32, "quantization": FourBit(group=32, numbers=ScaleFormat.Q4_1)},
    "int4": {"dtype": jnp.float32, "quantization": FourBit(group=32), "rounding": Rounding()},
}
ROWS = (1, 2, 3, 4, 7, 8, 9, 17, 33, 63, 64)


def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, kv: Any) -> tuple[jax.Array, Any]:
    """Something of each token alone: attention over pages has tests of its own."""
    group = queries.shape[1] // values.shape[1]
    return queries + jnp.repeat(keys * values, group, axis=1), kv


def stages_of(graph: Any) -> Callable[..., dict[str, jax.Array]]:
    """(weights, tokens i32[T], positions i32[T]) -> the results of the stages, [T, ...] each."""

    def stages(weights: Any, tokens: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
        model: Llama = nnx.merge(graph, weights)
        x, cos, sin = model.embed(tokens, positions)
        found = {"embedding": x, "cos": cos, "sin": sin}
        for number, layer in enumerate(model.layers):
            normed = layer.attention_norm(x)
            attended, _ = layer.attention(normed, cos, sin, None, attend)
            x, mlp_normed = layer.mlp_norm.of_sum(x, attended)
            gated = layer.mlp(mlp_normed)
            x = x + gated
            each = {"norm": normed, "attention": attended, "MLP's norm": mlp_normed, "MLP": gated, "output": x}
            found |= {f"{name} of layer {number}": value for name, value in each.items()}
        hidden = model.norm(x)
        logits = model.logits(hidden)
        shard = VocabShard(vocab_size=logits.shape[1], ops=model.ops)
        scores = logprobs(shard, lambda: logits, tokens[:, None], tokens >= 0)
        greatest, _ = most_likely(shard, logits)
        weights = tempered_weights(shard, logits, greatest, 1 + positions.astype(jnp.float32) / 100)
        found |= {"hidden": hidden, "logits": logits, "logprobs": scores.named, "top logprobs": scores.top}
        return found | {"weights": weights}

    return stages


def main() -> None:
    library.load(NATIVE)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, ROWS[-1]).astype(np.int32)
    positions = rng.integers(0, CONFIG.max_position_embeddings, ROWS[-1]).astype(np.int32)
    for form, options in FORMS.items():
        graph, weights = nnx.split(pack_for_cpu(random_weights(CONFIG, **options)))
        alone: dict[str, bytes] = {}
        differing: dict[str, list[int]] = {}
        for rows in ROWS:
            arguments = weights, tokens[-rows:], positions[-rows:]
            lowered = jax.jit(stages_of(graph)).lower(*arguments)
            found = lowered.compile(compiler_options=compiler_options("cpu"))(*arguments)
            bits = {name: np.asarray(value)[-1].tobytes() for name, value in found.items()}
            alone = alone or bits
            for name in bits:
                if bits[name] != alone[name]:
                    differing.setdefault(name, []).append(rows)
        print(json.dumps({"form": form, "stages": len(alone), "differing": differing}), flush=True)


if __name__ == "__main__":
    main()
