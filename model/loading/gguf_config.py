"""The model's configuration from the metadata of a GGUF file, in the spelling of `config.json`.

The names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from typing import Any

from model.config import ARCHITECTURE, LlamaConfig
from model.inputs.gguf import GgufFile
from model.inputs.words import shown
from model.loading.hf_format import adapter_refusal

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_REQUIRED = {
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "llama.context_length",
}
_HEAD_DIMS = ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count")
_OPTIONAL = {
    "num_key_value_heads": "llama.attention.head_count_kv",
    "rope_theta": "llama.rope.freq_base",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
}
# Metadata that change what is computed, each with the value that does not.
_NEUTRAL = {"llama.expert_count": 0, "llama.attention.causal": True, "llama.logit_scale": 1.0}
_END_IDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def gguf_model_config(file: GgufFile) -> LlamaConfig:
    """The model's constants. ValueError, naming the file, for what is missing or not supported."""
    raw = hf_config(file)
    try:
        return LlamaConfig.from_hf(raw)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The content of an equivalent `config.json`. ValueError naming everything that is missing or not supported."""
    metadata = file.metadata
    if metadata.get("general.type") == "adapter":
        raise ValueError(f"{file.path} {adapter_refusal(metadata.get('general.base_model.0.name'), 'FILE')}")
    if (found := metadata.get("general.architecture")) != "llama":
        raise ValueError(f"{file.path}: general.architecture={shown(found)} is not supported (only 'llama' is)")
    problems = [
        f"{name}={shown(metadata[name])} is not supported (only {value})"
        for name, value in _NEUTRAL.items()
        if metadata.get(name, value) != value
    ]
    absent = [name for name in _REQUIRED.values() if name not in metadata]
    absent += [] if EMBEDDING in file.tensors else [EMBEDDING]
    problems += [f"it lacks {', '.join(absent)}"] if absent else []
    head_dims = {metadata[name] for name in _HEAD_DIMS if isinstance(metadata.get(name), int)}
    if len(head_dims) > 1:
        problems.append(f"{', '.join(_HEAD_DIMS)} must be one number, and are {sorted(head_dims)}")
    if problems:
        raise ValueError(f"{file.path}: {'; '.join(problems)}")
    names = _REQUIRED | {key: name for key, name in _OPTIONAL.items() if name in metadata}
    raw = {key: _shortest(metadata[name]) for key, name in names.items()}
    return raw | {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "head_dim": min(head_dims, default=None),
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": HEAD not in file.tensors,
        "eos_token_id": sorted({metadata[name] for name in _END_IDS if isinstance(metadata.get(name), int)}),
    }


def _shortest(value: Any) -> Any:
    """The shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06. Other types are kept."""
    if not isinstance(value, float) or not 1e-30 < abs(value) < 1e30:
        return value
    narrow = struct.pack("<f", value)
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next((float(text) for text in texts if struct.pack("<f", float(text)) == narrow), value)


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    """GGUF files hold Llama 3.1's scaling as one factor for each frequency."""
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    factors = file.floats(ROPE_FACTORS)
    if factors is not None:
        if kind != "none":
            raise ValueError(
                f"{file.path}: llama.rope.scaling.type={shown(kind)} and {ROPE_FACTORS} exclude each other"
            )
        return {"rope_type": "factors", "factors": list(map(_shortest, factors))}
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": _shortest(file.metadata.get("llama.rope.scaling.factor"))}
