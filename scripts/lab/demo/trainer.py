"""The training loop: `model.network.llama.Llama` itself, with causal attention inside each packed sample."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.config import LlamaConfig
from model.loading.hf_format import expected_shapes, sources
from model.network.layers import Attend
from model.network.llama import Llama
from scripts.lab.demo.corpus import Corpus
from scripts.lab.demo.optimizer import Arrays, Optimizer
from scripts.lab.demo.packing import PackedBatch, pack
from scripts.lab.demo.tokenizer import SampleEncoder

MASKED = -1e9
SHARED = (
    -1
)  # the sample of tokens to which all later samples of their row attend, such as a prompt with several answers


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One form of batch: rows, and the share of the steps that have it."""

    row_length: int
    num_rows: int
    share: float
    kind: str  # of text: "short", "long", "with_tools" or "endless"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The length of the training, its learning rate, and the shapes of its batches."""

    steps: int
    learning_rate: float
    warmup: int
    seed: int
    shapes: tuple[Shape, ...]

    def rate(self, step: jax.Array) -> jax.Array:
        """Linear warm-up, then linear decay to zero."""
        left = (self.steps - step) / max(1, self.steps - self.warmup)
        return self.learning_rate * jnp.minimum((step + 1) / self.warmup, jnp.minimum(left, 1.0))

    def batch(self, step: int, corpus: Corpus, encoder: SampleEncoder) -> PackedBatch:
        """The batch of a step. It depends only on the seed and the step: an interrupted run continues identically."""
        rng = random.Random(f"{self.seed}/{step}")
        shape = rng.choices(self.shapes, weights=[s.share for s in self.shapes])[0]
        return pack(
            rng,
            lambda r: encoder.encode(corpus.sample(shape.kind, r)),
            filler=lambda r: encoder.encode(corpus.sample("short", r)),
            num_rows=shape.num_rows,
            row_length=shape.row_length,
        )


def packed_attention(samples: jax.Array) -> Attend:
    """Causal attention within each sample of rows `samples` i32[B, R] and to SHARED ones, for a flat row of B * R
    tokens."""
    rows, length = samples.shape
    causal = jnp.tril(jnp.ones((length, length), bool))
    same = (samples[:, :, None] == samples[:, None, :]) | (samples[:, None, :] == SHARED)
    bias = jnp.where(causal & same, 0.0, MASKED)[:, None, None]  # [B, 1, 1, R, R]

    def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, kv: Any) -> tuple[jax.Array, Any]:
        _, heads, dim = queries.shape
        kv_heads = keys.shape[1]
        q = queries.reshape(rows, length, kv_heads, heads // kv_heads, dim)
        k, v = (x.reshape(rows, length, kv_heads, dim) for x in (keys, values))
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * dim**-0.5
        weights = jax.nn.softmax(scores + bias, axis=-1).astype(v.dtype)
        return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(-1, heads, dim), kv

    return attend


def row_logits(
    model: Llama,
    tokens: jax.Array,  # i32[B, R]
    positions: jax.Array,  # i32[B, R]
    samples: jax.Array,  # i32[B, R]
) -> jax.Array:
    """f32[B, R, V]"""
    no_kv = [None] * model.config.num_layers
    hidden, _ = model(tokens.reshape(-1), positions.reshape(-1), no_kv, packed_attention(samples))
    return model.logits(hidden).reshape(*tokens.shape, -1)


def target_loss(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """The loss of predicting a batch's targets."""
    return mean_loss(logits, jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0], batch)


def mean_loss(logits: jax.Array, aimed: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """The weighted mean of the cross-entropies. `aimed` f32[B, R] is the mean logit of what is aimed at."""
    losses = jax.nn.logsumexp(logits, axis=-1) - aimed
    return jnp.vdot(losses, batch["weights"]) / jnp.sum(batch["weights"])


def rounded(params: Arrays) -> Arrays:
    """The float32 parameters, rounded as in the checkpoint."""
    return {name: param.astype(jnp.bfloat16).astype(jnp.float32) for name, param in params.items()}


class Loop(ABC):
    """Parameters as a flat dictionary, and the compiled step.

    Args:
        given: a model that the loss reads and that stays as it is.
    """

    def __init__(self, params: Arrays, schedule: Schedule, optimizer: Optimizer, given: Llama | None):
        self.params = params
        self.schedule = schedule
        self.optimizer = optimizer
        self.state = optimizer.init(params)
        self.step = 0
        self._given = given
        self._train_step = jax.jit(self._step, donate_argnums=(0, 1))

    @abstractmethod
    def _loss(self, params: Arrays, batch: dict[str, jax.Array], given: Llama | None) -> jax.Array: ...

    def _step(
        self,
        params: Arrays,
        state: dict[str, Arrays],
        batch: dict[str, jax.Array],
        step: jax.Array,
        given: Llama | None,
    ) -> tuple[Arrays, dict[str, Arrays], jax.Array]:
        loss, gradients = jax.value_and_grad(self._loss)(params, batch, given)
        params, state = self.optimizer.update(params, gradients, state, step, self.schedule.rate(step))
        return params, state, loss

    def run(
        self,
        corpus: Corpus,
        encoder: SampleEncoder,
        *,
        report_every: int,
        report: Callable[[Self, str], None],
        stop_after: int | None = None,
    ) -> None:
        """Trains to the end of the schedule or to step `stop_after`. `report` is called every `report_every` steps with
        a line to print."""
        last = min(self.schedule.steps, stop_after or self.schedule.steps)
        losses: list[jax.Array] = []
        num_tokens, since = 0, time.perf_counter()
        while self.step < last:
            batch = vars(self.schedule.batch(self.step, corpus, encoder))
            step = jnp.float32(self.step)
            self.params, self.state, loss = self._train_step(self.params, self.state, batch, step, self._given)
            losses.append(loss)
            num_tokens += batch["tokens"].size
            self.step += 1
            if self.step % report_every == 0 or self.step == last:
                mean = float(jnp.stack(losses).mean())
                rate = num_tokens / (time.perf_counter() - since)
                report(self, f"step {self.step}/{self.schedule.steps} loss {mean:.4f} {rate:.0f} tokens/s")
                losses, num_tokens, since = [], 0, time.perf_counter()

    def save(self, path: Path) -> None:
        """Writes parameters, optimizer state and step number atomically."""
        arrays = {f"params/{k}": v for k, v in self.params.items()}
        for group, members in self.state.items():
            arrays |= {f"{group}/{k}": v for k, v in members.items()}
        partial = path.with_suffix(".partial.npz")
        stored: dict[str, Any] = {k: np.asarray(v) for k, v in arrays.items()}
        np.savez(partial, step=self.step, **stored)
        partial.replace(path)

    def restore(self, path: Path) -> None:
        """Reads a file of `save`."""
        with np.load(path) as saved:
            self.step = int(saved["step"])
            self.params = {k: jnp.asarray(saved[f"params/{k}"]) for k in self.params}
            self.state = {g: {k: jnp.asarray(saved[f"{g}/{k}"]) for k in members} for g, members in self.state.items()}


class Trainer(Loop):
    """Trains a model. Its parameters are named by their paths ("layers.0.mlp.down.kernel").

    Args:
        teacher: a model with the same tokens, whose distributions are learned in place of the text's next tokens.
    """

    def __init__(self, config: LlamaConfig, schedule: Schedule, teacher: Llama | None = None):
        self.config = config
        self.teacher = teacher
        model = Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(schedule.seed))
        self._graph, state = nnx.split(model, nnx.Param)
        flat = list(nnx.to_flat_state(state))
        self._variables = {".".join(map(str, path)): (path, variable) for path, variable in flat}
        params: Arrays = {name: variable.get_value() for name, (_, variable) in self._variables.items()}
        super().__init__(params, schedule, Optimizer(blocks=_blocks(config, params)), given=teacher)

    def model(self, params: Arrays) -> Llama:
        """The model with these parameters."""
        flat = [(path, variable.replace(params[name])) for name, (path, variable) in self._variables.items()]
        return nnx.merge(self._graph, nnx.from_flat_state(flat))

    def start_from(self, model: Llama) -> None:
        """Takes the parameters of a model with the same configuration. To be called before the first step."""
        flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
        self.params = {".".join(map(str, path)): jnp.array(variable.get_value()) for path, variable in flat}

    def _loss(self, params: Arrays, batch: dict[str, jax.Array], teacher: Llama | None) -> jax.Array:
        read = (batch["tokens"], batch["positions"], batch["samples"])
        logits = row_logits(self.model(params), *read)
        if teacher is None:
            return target_loss(logits, batch)
        return mean_loss(logits, jnp.sum(jax.nn.softmax(row_logits(teacher, *read)) * logits, axis=-1), batch)


def _blocks(config: LlamaConfig, params: Arrays) -> dict[str, tuple[int, ...]]:
    """Muon's parameters: every matrix except the embedding, with the heights of the matrices that are fused in it."""
    shapes = expected_shapes(config)
    return {
        name: tuple(shapes[source.key][0] for source in sources(name, config.family))
        for name, param in params.items()
        if param.ndim == 2 and name != "embedding"
    }
