"""Writes the trained parameters as a Hugging Face checkpoint in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
from tokenizers import Tokenizer

from model.loading.export import save_hf
from model.network.llama import Llama
from scripts.lab.demo import tokenizer as llama_tokenizer
from scripts.lab.demo.optimizer import Arrays

TEMPERATURE, TOP_P = 0.6, 0.9  # Llama 3's own


def rounded(params: Arrays) -> Arrays:
    """The float32 parameters, rounded as in the checkpoint."""
    return {name: param.astype(jnp.bfloat16).astype(jnp.float32) for name, param in params.items()}


def export(folder: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Writes `model.safetensors`, `config.json`, `generation_config.json` and the tokenizer's files."""
    config = model.config
    save_hf(model, folder)
    generation = {
        "bos_token_id": config.bos_token_id,
        "do_sample": True,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": tokenizer.token_to_id(llama_tokenizer.PADDING),
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    llama_tokenizer.save(tokenizer, folder, config.max_position_embeddings)
