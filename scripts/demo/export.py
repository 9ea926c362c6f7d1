"""Writes the trained parameters as a Hugging Face checkpoint in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from model.config import LlamaConfig
from model.hf_format import expected_shapes, sources
from scripts.demo import tokenizer as llama_tokenizer
from scripts.demo.optimizer import Arrays

TEMPERATURE, TOP_P = 0.6, 0.9  # Llama 3's own


def rounded(params: Arrays) -> Arrays:
    """The float32 parameters as the checkpoint will hold them."""
    return {name: param.astype(jnp.bfloat16).astype(jnp.float32) for name, param in params.items()}


def export(folder: Path, config: LlamaConfig, params: Arrays, tokenizer: Tokenizer) -> None:
    """`model.safetensors`, `config.json`, `generation_config.json` and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    save_file(hf_tensors(config, params), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the writer makes it private, but a checkpoint is there to be read
    _write_json(folder / "config.json", config.to_hf())
    generation = {
        "bos_token_id": config.bos_token_id,
        "do_sample": True,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": tokenizer.token_to_id(llama_tokenizer.PADDING),
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
    }
    _write_json(folder / "generation_config.json", generation)
    llama_tokenizer.save(tokenizer, folder, config.max_position_embeddings)


def hf_tensors(config: LlamaConfig, params: Arrays) -> dict[str, np.ndarray]:
    """Checkpoint key -> bfloat16 [out, in], the fused parameters cut apart."""
    shapes = expected_shapes(config)
    tensors: dict[str, np.ndarray] = {}
    for name, param in params.items():
        array = np.asarray(param).astype(ml_dtypes.bfloat16)
        rows = array.T if array.ndim == 2 and name != "embedding" else array
        start = 0
        for source in sources(name, config):
            stop = start + shapes[source.key][0]
            tensors[source.key] = np.ascontiguousarray(rows[start:stop])
            start = stop
        assert start == rows.shape[0], f"{name}: {start} rows of {rows.shape[0]} have a place"
    assert {key: array.shape for key, array in tensors.items()} == shapes
    return tensors


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
