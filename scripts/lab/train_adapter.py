"""Trains a LoRA adapter of the demo: `python -m scripts.lab train_adapter pirate --output model/demo/adapters/pirate`.

The text is that of `scripts/lab/demo/adapters.py`. Only A and B are trained, with the model code that serves them. The
output is a folder as PEFT writes it, in bfloat16. Training takes minutes of two cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from model.config import LlamaConfig
from model.inputs.paths import local_path
from model.loading.hf_format import ADAPTER_CONFIG, ADAPTER_FILE, expected_shapes
from model.loading.source import DEMO_FOLDER
from model.loading.weights import load_hf
from model.network.layers import Attend
from model.network.llama import Llama
from model.network.lora import TARGETS, AdapterSlots, Slots, StepAdapters
from scripts.lab.demo import evaluate
from scripts.lab.demo.adapters import TEXTS
from scripts.lab.demo.optimizer import Arrays, Optimizer
from scripts.lab.demo.tokenizer import SampleEncoder
from scripts.lab.demo.trainer import Loop, Schedule, Shape, rounded, row_logits, target_loss

SHAPES = (  # 1,024 tokens each
    Shape(row_length=128, num_rows=8, share=0.6, kind="short"),
    Shape(row_length=256, num_rows=4, share=0.3, kind="long"),
    Shape(row_length=512, num_rows=2, share=0.1, kind="with_tools"),
)
SCALE = 2  # alpha / rank
REPORT_EVERY = 50


@partial(jax.tree_util.register_dataclass, data_fields=["base", "slots"], meta_fields=[])
@dataclass(frozen=True)
class Adapted:
    """A model with one adapter for all its tokens. It stands for a `Llama`."""

    base: Llama
    slots: AdapterSlots

    @property
    def config(self) -> LlamaConfig:
        return self.base.config

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, kv: list[Any], attend: Attend
    ) -> tuple[jax.Array, list[Any]]:
        adapters = StepAdapters(self.slots, jnp.ones_like(tokens), num_slots=1, num_shards=self.base.num_shards)
        hidden, new_kv, _ = self.base.run(tokens, positions, kv, attend, adapters=adapters)
        return hidden, new_kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.base.logits(hidden)


class AdapterTrainer(Loop):
    """Trains an adapter of `base`. Its parameters are named as in a checkpoint, and begin as PEFT's."""

    def __init__(self, base: Llama, schedule: Schedule, rank: int):
        self.base, self.rank = base, rank
        shapes, rng = expected_shapes(base.config), np.random.default_rng(schedule.seed)
        params: Arrays = {}
        for name in base.config.projections:
            outputs, inputs = shapes[f"{name}.weight"]
            params[f"{name}.lora_A"] = jnp.asarray(rng.uniform(-1, 1, (rank, inputs)) * inputs**-0.5, jnp.float32)
            params[f"{name}.lora_B"] = jnp.zeros((outputs, rank))
        super().__init__(params, schedule, Optimizer(blocks={}, adam_rate=1.0), given=base)

    def model(self, params: Arrays, base: Llama) -> Any:  # which stands for a Llama
        """The base model with these parameters."""

        def slots(layer: int, linear: str, parts: tuple[str, ...]) -> Slots:
            part = "self_attn" if linear.startswith("attention") else "mlp"
            names = [f"model.layers.{layer}.{part}.{name}" for name in parts]
            a = jnp.stack([params[f"{name}.lora_A"] for name in names])
            return a, tuple(SCALE * params[f"{name}.lora_B"].T for name in names)

        layers = range(base.config.num_layers)
        return Adapted(base, [{name: slots(layer, name, parts) for name, parts in TARGETS.items()} for layer in layers])

    def _loss(self, params: Arrays, batch: dict[str, jax.Array], given: Llama | None) -> jax.Array:
        assert given is not None
        model = self.model(params, given)
        return target_loss(row_logits(model, batch["tokens"], batch["positions"], batch["samples"]), batch)


def save_peft(folder: Path, params: Mapping[str, jax.Array], rank: int) -> None:
    """Writes an adapter as PEFT does, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": None,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": SCALE * rank,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": [name for parts in TARGETS.values() for name in parts],
        "task_type": "CAUSAL_LM",
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"base_model.model.{name}.weight": np.asarray(x.astype(jnp.bfloat16)) for name, x in params.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    (folder / ADAPTER_FILE).chmod(0o644)  # safetensors makes the file private


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TEXTS, help="adapter, with a text of its own")
    parser.add_argument("--output", type=local_path, required=True, help="folder of the adapter")
    parser.add_argument(
        "--base", metavar="FOLDER", type=local_path, default=DEMO_FOLDER, help="checkpoint (default: the demo)"
    )
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = parse_arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    text = TEXTS[arguments.name]
    encoder = SampleEncoder(Tokenizer.from_file(str(arguments.base / "tokenizer.json")), prompt_weight=0.0)
    schedule = Schedule(
        steps=arguments.steps, learning_rate=arguments.learning_rate, warmup=20, seed=arguments.seed, shapes=SHAPES
    )
    base = load_hf(arguments.base, LlamaConfig.from_file(arguments.base), dtype=jnp.float32)
    trainer = AdapterTrainer(base, schedule, arguments.rank)
    print(f"{sum(p.size for p in trainer.params.values()):,} parameters", flush=True)
    trainer.run(text, encoder, report_every=REPORT_EVERY, report=lambda _, line: print(line, flush=True))
    save_peft(arguments.output, trainer.params, arguments.rank)
    model = trainer.model(rounded(trainer.params), base)
    right = evaluate.exact(model, encoder, text.cases())
    print(f"{sum(right)} of {len(right)} answers are exact")
    return 0
