"""Checkpoint folders as GGUF files, written by llama.cpp's own package in the way of its converter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from model.config import Llama3Scaling, LlamaConfig
from model.network.rope import inverse_frequencies

Type = gguf.GGMLQuantizationType
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def name_of(key: str) -> str:
    if key in TOP:
        return TOP[key]
    _, _, layer, *rest = key.removesuffix(".weight").split(".")
    return f"blk.{layer}.{LAYER['.'.join(rest)]}.weight"


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of q or k as the converter puts them."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, weights.shape[1])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def heads_of(key: str, config: LlamaConfig) -> int | None:
    return {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(key.split(".")[-2])


def values_of(tensors: Mapping[str, np.ndarray], type: Type) -> dict[str, np.ndarray]:
    """What is left of the values of matrices that are stored in `type`."""
    wide = {key: value.astype(np.float32) for key, value in tensors.items()}
    return {
        key: value if value.ndim == 1 else np.asarray(dequantize(quantize(value, type), type))
        for key, value in wide.items()
    }


def metadata_of(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if isinstance(config.rope_scaling, Llama3Scaling):
        bare, scaled = (inverse_frequencies(config.head_dim, config.rope_theta, s) for s in (None, config.rope_scaling))
        writer.add_tensor("rope_freqs.weight", (bare / scaled).astype(np.float32))


def write(
    path: Path,
    config: LlamaConfig,
    tensors: Mapping[str, np.ndarray],
    type: Type = Type.F32,
    *,
    packed: Callable[[str, np.ndarray], tuple[np.ndarray, Type]] | None = None,
    tokenizer: Path | None = None,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    architecture: str = "llama",
    **splitting: Any,
) -> Path:
    """Matrices in `type`, or as `packed` makes them of their name and permuted values; vectors in float32. `splitting`:
    arguments of the writer, which then puts the parts next to each other."""
    writer = gguf.GGUFWriter(path, architecture, **splitting)
    metadata_of(writer, config)
    if tokenizer is not None:
        tokenizer_of(writer, tokenizer)
    for key, value in tensors.items():
        wide = value.astype(np.float32)
        if wide.ndim == 1:
            writer.add_tensor(name_of(key), wide)
            continue
        heads = heads_of(key, config)
        rows = np.ascontiguousarray(permuted(wide, heads) if heads else wide)
        stored, own = packed(key, rows) if packed else (quantize(rows, type), type)
        writer.add_tensor(name_of(key), np.ascontiguousarray(stored), raw_dtype=own)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_adapter(
    path: Path,
    config: LlamaConfig,
    tensors: Mapping[str, np.ndarray],
    type: Type = Type.F32,
    *,
    alpha: float,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> dict[str, np.ndarray]:
    """PEFT's tensors as llama.cpp's convert_lora_to_gguf.py stores them. Returns the values that are left of them."""
    writer, left = gguf.GGUFWriter(path, "llama"), {}
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for stored, value in tensors.items():
        module, part = stored.removeprefix("base_model.model.").removesuffix(".weight").split(".lora_")
        heads = heads_of(f"{module}.weight", config) if part == "B" else None
        # Rows that are no whole blocks are stored in float16.
        own = Type.F16 if type is Type.Q8_0 and value.shape[1] % 32 else type
        wide = value.astype(np.float32)
        packed = quantize(np.ascontiguousarray(permuted(wide, heads) if heads else wide), own)
        writer.add_tensor(f"{name_of(f'{module}.weight')}.lora_{part.lower()}", packed, raw_dtype=own)
        left[stored] = np.asarray(dequantize(quantize(wide, own), own))
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return left


def tokenizer_of(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Of a folder's `tokenizer.json` and its neighbours."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["content"]: token["id"] for token in raw["added_tokens"]}
    by_id = {id: token for token, id in (raw["model"]["vocab"] | special).items()}
    tokens = [by_id[id] for id in range(len(by_id))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    merges: list[Any] = raw["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id),
                      ("pad_token", writer.add_pad_token_id)):  # fmt: skip
        add(special[settings[name]])
    writer.add_chat_template(settings["chat_template"])
