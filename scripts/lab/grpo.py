"""GRPO in one process: the engine answers, a program rewards, optax trains, and the engine has the new weights.

    python -m scripts.lab grpo --output FOLDER
    scripts/serve --model FOLDER

Group relative policy optimisation (arXiv 2402.03300) teaches the demo to compare three numbers. Its training text
compares two. A group is several answers to one question, drawn at temperature 1. An answer's advantage is its reward
less the group's mean, in standard deviations of the group, so no network estimates values. The old policy's
log-probabilities are the engine's. After each step the weights go to the engine in memory.

The column `off` is the greatest difference between the engine's log-probability of a drawn token and the trainer's. The
checkpoint is in float32: bfloat16 would round the last changes away.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from model.inputs.paths import local_path
from model.loading.source import resolve
from model.network.llama import Llama
from scripts.flags.errors import add_debug_flag, run_command
from scripts.lab.demo.arithmetic import held_out_pairs
from scripts.lab.demo.export import save_hf
from scripts.lab.planning.plot import check_installed
from scripts.lab.rollouts import Rollouts, dense_logprobs, rollouts
from scripts.lab.tables import Table, say, say_head
from scripts.llm import LLM, SamplingParams
from scripts.offline.results import CompletionOutput, RequestOutput

MAX_TOKENS = 32  # of an answer
NUM_HELD_OUT = 200  # questions that training never asks
MEAN_OF = 10  # steps, in the picture
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


# ---- the task ----


class Question(NamedTuple):
    """A question about numbers, the greatest of which is asked for."""

    text: str
    numbers: tuple[int, ...]


def question(rng: random.Random) -> Question:
    """The greatest of three numbers. The demo's training text compares two."""
    a, b, c = numbers = tuple(rng.sample(range(100), 3))
    return Question(f"Which is the largest of {a}, {b} and {c}?", numbers)


def comparison(a: int, b: int) -> Question:
    """What the demo has learned."""
    return Question(f"Which is larger, {a} or {b}?", (a, b))


def new_questions(rng: random.Random, never: Container[Question]) -> Iterator[Question]:
    """Questions without end, none of them one of `never`."""
    while True:
        drawn = question(rng)
        if drawn not in never:
            yield drawn


def reward(asked: Question, output: CompletionOutput) -> float:
    """1 for "57 is larger than 31." of the greatest number and another one, and 0 for everything else."""
    greatest = max(asked.numbers)
    right = {f"{greatest} is larger than {other}." for other in asked.numbers if other != greatest}
    return float(output.finish_reason == "stop" and output.text in right)


# ---- the method ----


def advantages(rewards: np.ndarray) -> np.ndarray:
    """f32[groups, size] of rewards f32[groups, size]. A group whose answers are all as good has none."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return np.asarray(centred / (rewards.std(axis=1, keepdims=True) + 1e-6), np.float32)


def objective(
    policy: jax.Array,  # f32[B, R], log-probabilities of the drawn tokens
    old: jax.Array,  # f32[B, R], by the policy that drew them
    reference: jax.Array,  # f32[B, R], by the policy before training
    weights: jax.Array,  # f32[B, R], as of `Rollouts`: every answer counts the same, however long it is
    advantage: jax.Array,  # f32[B, R], of the token's answer
    *,
    clip: float,
    kl_weight: float,
) -> jax.Array:
    """What training maximises (equation 3)."""
    ratio = jnp.exp(policy - old)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
    return jnp.vdot(gain - kl_weight * divergence(policy, reference), weights) / jnp.sum(weights)


def divergence(policy: jax.Array, reference: jax.Array) -> jax.Array:
    """An estimate of KL(policy || reference) in nats, of tokens that the policy has drawn, from their log-probabilities
    under both (equation 4). It has no bias, and is never negative."""
    return jnp.expm1(reference - policy) - (reference - policy)


class Trainer:
    """A policy in training, and the reference that it begins as."""

    def __init__(self, model: Llama, optimizer: optax.GradientTransformation, *, clip: float, kl_weight: float) -> None:
        self._graph, self.params = nnx.split(model)
        self._reference = jax.tree.map(jnp.copy, self.params)  # each step overwrites `params`
        self._optimizer = optimizer
        self._state = optimizer.init(self.params)
        self._clip, self._kl_weight = clip, kl_weight
        self._logprobs = jax.jit(self._logprobs_of)
        self._step = jax.jit(self._step_of, donate_argnums=(0, 1))

    @property
    def model(self) -> Llama:
        """The policy as it is now."""
        return nnx.merge(self._graph, self.params)

    def step(self, batch: Rollouts, advantage: np.ndarray) -> tuple[float, float]:
        """One gradient step.

        Args:
            advantage: f32[groups, size], of the answers in the batch's rows.

        Returns the KL divergence to the reference before the step, in nats a token, and the greatest difference between
        the policy's log-probability of a drawn token and the engine's.
        """
        none = np.zeros((len(advantage), 1), np.float32)  # of the tokens that belong to no answer
        of_tokens = np.take_along_axis(np.hstack([none, advantage]), np.maximum(batch.samples, 0), axis=1)
        arrays = asdict(batch)
        reference = self._logprobs(self._reference, arrays)
        self.params, self._state, kl, off = self._step(self.params, self._state, arrays, reference, of_tokens)
        return float(kl), float(off)

    def _logprobs_of(self, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        """The log-probabilities of the drawn tokens; 0 elsewhere."""
        model = nnx.merge(self._graph, params)
        read = (batch[name] for name in ("tokens", "targets", "positions", "samples"))
        return jnp.where(batch["weights"] > 0, dense_logprobs(model, *read), 0.0)

    def _step_of(
        self, params: Any, state: Any, batch: dict[str, jax.Array], reference: jax.Array, advantage: jax.Array
    ) -> tuple[Any, Any, jax.Array, jax.Array]:
        old, weights = batch["logprobs"], batch["weights"]

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            policy = self._logprobs_of(params, batch)
            bounds = {"clip": self._clip, "kl_weight": self._kl_weight}
            return -objective(policy, old, reference, weights, advantage, **bounds), policy

        gradients, policy = jax.grad(loss, has_aux=True)(params)
        updates, state = self._optimizer.update(gradients, state, params)
        kl = jnp.sum(divergence(policy, reference)) / jnp.sum(weights > 0)
        return optax.apply_updates(params, updates), state, kl, jnp.abs(policy - old).max()


# ---- the loop ----


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is told of a step."""

    step: int
    reward: float  # mean of all answers
    kl: float  # to the reference, in nats a token
    off: float  # greatest |engine's - trainer's| log-probability of a token
    tokens_per_s: float  # of rollouts
    seconds: dict[str, float]  # by phase


def train(llm: LLM, trainer: Trainer, args: argparse.Namespace, held_out: Iterable[Question]) -> Iterator[Step]:
    """Trains step by step. The engine has the trainer's weights after each."""
    questions = new_questions(random.Random(args.seed), set(held_out))
    drawing = SamplingParams(n=args.group_size, temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0)
    for number in range(1, args.steps + 1):
        seconds: dict[str, float] = defaultdict(float)
        asked = [next(questions) for _ in range(args.num_questions)]
        with timed(seconds, "rollout"):
            results = ask(llm, asked, drawing)
            rewards = np.array([[reward(q, o) for o in r.outputs] for q, r in zip(asked, results, strict=True)])
        with timed(seconds, "train"):
            batch = rollouts(results)
            kl, off = trainer.step(batch, advantages(rewards))
            jax.block_until_ready(trainer.params)
        with timed(seconds, "update"):
            llm.update_weights(trainer.params, names="own")
        rate = batch.drawn.sum() / seconds["rollout"]
        yield Step(step=number, reward=float(rewards.mean()), kl=kl, off=off, tokens_per_s=rate, seconds=dict(seconds))


def ask(llm: LLM, asked: Sequence[Question], sampling: SamplingParams) -> list[RequestOutput]:
    """The answers to each question, as to the only message of a chat."""
    return llm.chat([[{"role": "user", "content": one.text}] for one in asked], sampling)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the body's seconds to those of the phase."""
    since = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - since


def accuracy(llm: LLM, asked: Sequence[Question]) -> float:
    """The share of the questions that greedy answers get right."""
    results = ask(llm, asked, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    return sum(reward(q, r.outputs[0]) for q, r in zip(asked, results, strict=True)) / len(asked)


# ---- the command ----


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab grpo", description=__doc__.splitlines()[0])
    p.add_argument("--output", type=local_path, required=True, metavar="FOLDER", help="the checkpoint is written there")
    p.add_argument("--model", default="demo", help="a chat model to start from (default: demo)")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--num-questions", type=int, default=16, metavar="N", help="groups of a step")
    p.add_argument("--group-size", type=int, default=16, metavar="N", help="answers to each question")
    p.add_argument("--learning-rate", type=float, default=8e-5, help="at first; it falls to 0 by the last step")
    p.add_argument("--kl-weight", type=float, default=0.02, help="beta of the paper")
    p.add_argument("--clip", type=float, default=0.2, help="epsilon of the paper")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--plot", type=local_path, metavar="FILE.png", help="reward and KL by step (matplotlib)")
    add_debug_flag(p)
    return p


def learn(args: argparse.Namespace) -> int:
    """Trains, with a line for each step, and writes the checkpoint. Returns the exit code."""
    wrong = [
        f"--{name.replace('_', '-')} {getattr(args, name)} is not {least} or more"
        for name, least in (("steps", 1), ("num_questions", 1), ("group_size", 2))
        if getattr(args, name) < least
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    if args.plot is not None:
        check_installed()
    jax.config.update("jax_platforms", "cpu")
    folder = resolve(args.model).path
    if folder is None or not folder.is_dir():
        raise ValueError(f"--model {args.model}: a folder is needed, whose tokenizer the new checkpoint gets")
    rng = random.Random(f"{args.seed}/held out")
    held_out = [question(rng) for _ in range(NUM_HELD_OUT)]
    taught = [comparison(*pair) for pair in held_out_pairs()]
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(args.learning_rate, 0, args.steps))
    )
    say_head()
    began = time.perf_counter()
    with LLM(args.model, device="cpu", dtype="float32", max_model_len=256, seed=args.seed) as llm:
        trainer = Trainer(llm.model(), optimizer, clip=args.clip, kl_weight=args.kl_weight)
        before = accuracy(llm, held_out), accuracy(llm, taught)
        columns = {"step": "4d", "reward": "6.3f", "KL": "7.4f", "off": "8.1e", "tokens/s": "8.0f", "s": "5.1f"}
        phases = ("rollout", "train", "update")
        table = Table(columns | dict.fromkeys(phases, "7.0%"), say)
        steps = []
        for told in train(llm, trainer, args, held_out):
            whole = sum(told.seconds.values())
            shares = [told.seconds[phase] / whole for phase in phases]
            table.row(told.step, told.reward, told.kl, told.off, told.tokens_per_s, whole, *shares)
            steps.append(told)
        after = accuracy(llm, held_out), accuracy(llm, taught)
    save_hf(trainer.model, args.output, dtype=jnp.float32)
    for name in TOKENIZER_FILES:
        if (folder / name).exists():
            shutil.copy(folder / name, args.output)
    result = {
        "held_out_questions": {"before": before[0], "after": after[0]},
        "held_out_comparisons_of_two": {"before": before[1], "after": after[1]},
        "seconds": round(time.perf_counter() - began),
        "steps": [asdict(told) for told in steps],
    }
    (args.output / "grpo.json").write_text(json.dumps(result, indent=1) + "\n")
    say(f"\nright of {len(held_out)} held-out questions, greedily: {before[0]:.3f}, then {after[0]:.3f}")
    say(f"right of {len(taught)} comparisons of two numbers, as learned before: {before[1]:.3f}, then {after[1]:.3f}")
    say(f"{time.perf_counter() - began:.0f} s; scripts/serve --model {args.output} serves the checkpoint")
    if args.plot is not None:
        plot(steps, args.plot)
    return 0


def plot(steps: Sequence[Step], path: Path) -> None:
    """Draws the mean reward and the divergence of each step, and their means over MEAN_OF steps up to it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"reward": "mean reward of the answers drawn", "kl": "KL to the start, nats a token"}
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        values = [getattr(told, name) for told in steps]
        means = [np.mean(values[max(0, end - MEAN_OF) : end]) for end in range(1, len(values) + 1)]
        axes.plot([told.step for told in steps], values, linewidth=0.8, alpha=0.5, color="tab:blue")
        axes.plot([told.step for told in steps], means, linewidth=2, color="tab:blue")
        axes.set(xlabel="step", title=title, ylim=(0, 1 if name == "reward" else None))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("grpo", lambda: learn(args), debug=args.debug)
