"""How near the engine's log-probabilities are to those of a trainer, on the tokens that the engine has drawn.

    python -m scripts.lab agreement
    python -m scripts.lab agreement --model ~/ckpt/mid-f32 --forms float32 drafts

A trainer computes whole rows in float32, with causal attention and no pages (`scripts/lab/rollouts.py`). The engine
computes the same weights in each form, and draws at temperature 1. The KL divergence is that of the trainer from the
engine, estimated from the drawn tokens. Two right computations in float32 differ by their roundings: the last columns
are the worst differences of each from a forward in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.loading.source import DEMO, resolve
from model.loading.weights import load_hf
from model.network.llama import Llama, rotation_of
from scripts.flags.errors import add_debug_flag, run_command
from scripts.lab.rollouts import Rollouts, dense_logprobs, rollouts
from scripts.lab.tables import Table, say, say_head
from scripts.llm import LLM, SamplingParams
from server.flag import EachCounts

FORMS: Mapping[str, Mapping[str, Any]] = {  # the engine's settings
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8-weights": {"quantization": "int8"},
    "int8-kv": {"kv_cache_dtype": "int8"},
    "drafts": {  # which pay with few rows; programs that are yet to be compiled have none
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "max_num_seqs": 4,
        "compile_all_first": True,
    },
}
QUESTIONS = (
    "What is 47 + 35?",
    "What is 47 + 35? Answer in JSON.",
    "Hello",
    "Tell me a story about a fox.",
    "Count from 4 to 16.",
    "Which is larger, 57 or 31?",
    "Which is the largest of 97, 41 and 66?",
    "What is the capital of Spain?",
    "Explain gravity.",
)


def exact_logprobs(model: Llama, batch: Rollouts) -> np.ndarray:
    """f64[B, R], as `dense_logprobs` of a float32 model and rows with one answer, in NumPy and float64. The angles of
    the rotation are float32, which is how the model defines them."""
    config = model.config
    state = {".".join(map(str, path)): value.get_value() for path, value in nnx.to_flat_state(nnx.state(model))}
    weights = {name: np.asarray(value).astype(np.float64) for name, value in state.items()}
    width = batch.tokens.shape[1]
    cos, sin = (np.asarray(x, np.float64) for x in rotation_of(config, jnp.arange(width)))  # [R, 1, H / 2]
    causal = np.tril(np.ones((width, width), bool))
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps) * weights[f"{name}.scale"]

    def rotated(x: np.ndarray) -> np.ndarray:  # [R, heads, H]
        first, second = np.split(x, 2, axis=-1)
        c, s = cos[: len(x)], sin[: len(x)]
        return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    def row(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        length = len(tokens)
        x = weights["embedding"][tokens]
        for i in range(config.num_layers):
            qkv = norm(x, f"layers.{i}.attention_norm") @ weights[f"layers.{i}.attention.qkv.kernel"].T
            split = np.split(qkv.reshape(length, -1, dim), (heads, heads + kv_heads), axis=1)
            queries, keys = rotated(split[0]), rotated(split[1])
            keys, values = (np.repeat(part, heads // kv_heads, axis=1) for part in (keys, split[2]))
            scores = np.where(causal[:length, :length], np.einsum("tnh,snh->nts", queries, keys) * dim**-0.5, -np.inf)
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            shares /= shares.sum(axis=-1, keepdims=True)
            attended = np.einsum("nts,snh->tnh", shares, values).reshape(length, -1)
            x = x + attended @ weights[f"layers.{i}.attention.out.kernel"].T
            gate, up = np.split(
                norm(x, f"layers.{i}.mlp_norm") @ weights[f"layers.{i}.mlp.gate_up.kernel"].T, 2, axis=-1
            )
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"layers.{i}.mlp.down.kernel"].T
        logits = norm(x, "norm") @ weights["embedding" if model.head is None else "head.kernel"].T
        greatest = logits.max(axis=-1)
        aimed = np.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return aimed - greatest - np.log(np.exp(logits - greatest[:, None]).sum(axis=-1))

    found = np.zeros(batch.tokens.shape)
    for number, length in enumerate((batch.samples != 0).sum(axis=1)):  # without the padding
        found[number, :length] = row(batch.tokens[number, :length], batch.targets[number, :length])
    return found


def drawn_by(model: str, form: str, samples: int, max_tokens: int) -> tuple[Rollouts, int]:
    """The answers of an engine in this form, and how many of their tokens were accepted drafts."""
    settings = {"dtype": "float32", "max_model_len": 512, "seed": 1, **FORMS[form]}
    with LLM(model, device="cpu", **settings) as llm:
        sampling = SamplingParams(n=samples, temperature=1.0, max_tokens=max_tokens, logprobs=0)
        results = llm.chat([[{"role": "user", "content": text}] for text in QUESTIONS], sampling)
        alone = [replace(result, outputs=[output]) for result in results for output in result.outputs]
        return rollouts(alone), llm.stats().speculation.num_accepted_tokens


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab agreement", description=__doc__.splitlines()[0])
    p.add_argument("--model", default=DEMO, help="a chat model in a folder, or a hub name (default: demo)")
    p.add_argument("--forms", nargs="+", action=EachCounts, choices=FORMS, default=list(FORMS))
    p.add_argument("--samples", type=int, default=8, metavar="N", help="answers to each of the questions")
    p.add_argument("--max-tokens", type=int, default=128, metavar="N", help="of each answer")
    add_debug_flag(p)
    return p


def compare(args: argparse.Namespace) -> int:
    """Prints a line for each form. Returns the exit code."""
    wrong = [
        f"--{name.replace('_', '-')} {getattr(args, name)} is not 1 or more"
        for name in ("samples", "max_tokens")
        if getattr(args, name) < 1
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    jax.config.update("jax_platforms", "cpu")
    source = resolve(args.model)
    if source.weights is None:
        raise ValueError(f"--model {args.model}: there are no weights that a trainer could have")
    model = load_hf(source.weights, source.config, dtype=jnp.float32)
    logprobs = jax.jit(dense_logprobs)
    say_head()
    columns = {
        "engine": "<12",
        "tokens": "6d",
        "of drafts": "6d",
        "worst": "8.1e",
        "mean": "8.1e",
        "KL a token": "8.1e",
    }
    table = Table(columns | {"engine - float64": "8.1e", "trainer - float64": "8.1e"}, say)
    for form in args.forms:
        batch, num_accepted = drawn_by(args.model, form, args.samples, args.max_tokens)
        drawn = batch.drawn
        trainer = np.asarray(logprobs(model, batch.tokens, batch.targets, batch.positions, batch.samples))[
            drawn
        ].astype(np.float64)
        engine, exact = batch.logprobs[drawn].astype(np.float64), exact_logprobs(model, batch)[drawn]
        apart = np.abs(engine - trainer)
        kl = np.mean(np.expm1(trainer - engine) - (trainer - engine))
        errors = np.abs(engine - exact).max(), np.abs(trainer - exact).max()
        table.row(form, int(drawn.sum()), num_accepted, *map(float, (apart.max(), apart.mean(), kl, *errors)))
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("agreement", lambda: compare(args), debug=args.debug)
