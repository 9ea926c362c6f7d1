"""The model's configuration from the metadata of a GGUF file, in the spelling of `config.json`.

The names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from typing import Any

from model.config import LlamaConfig
from model.families import FAMILIES
from model.inputs.gguf import GgufFile
from model.inputs.schema import unsupported
from model.inputs.words import shown
from model.loading.hf_format import adapter_refusal

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Field of `config.json` -> its key in the metadata, in which {} stands for the architecture.
_REQUIRED = {
    "hidden_size": "{}.embedding_length",
    "intermediate_size": "{}.feed_forward_length",
    "num_hidden_layers": "{}.block_count",
    "num_attention_heads": "{}.attention.head_count",
    "rms_norm_eps": "{}.attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "{}.context_length",
}
_HEAD_DIMS = ("{}.attention.key_length", "{}.attention.value_length", "{}.rope.dimension_count")
_OPTIONAL = {
    "num_key_value_heads": "{}.attention.head_count_kv",
    "rope_theta": "{}.rope.freq_base",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
}
_SCALING = "{}.rope.scaling"
# Metadata that change what is computed, each with the value that does not.
_NEUTRAL = {"{}.expert_count": 0, "{}.attention.causal": True, "{}.logit_scale": 1.0}
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
    found, families = metadata.get("general.architecture"), [x for x in FAMILIES.values() if x.gguf is not None]
    family = next((family for family in families if family.gguf == found), None)
    if family is None:
        only = " or ".join(repr(family.gguf) for family in families)
        raise ValueError(f"{file.path}: general.architecture={shown(found)} is not supported (only {only} is)")

    def key(pattern: str) -> str:
        return pattern.format(family.gguf)

    problems = unsupported(metadata, {key(name): (None, value) for name, value in _NEUTRAL.items()})
    absent = [name for name in map(key, _REQUIRED.values()) if name not in metadata]
    absent += [] if EMBEDDING in file.tensors else [EMBEDDING]
    problems += [f"it lacks {', '.join(absent)}"] if absent else []
    widths = [key(name) for name in _HEAD_DIMS]
    head_dims = {metadata[name] for name in widths if isinstance(metadata.get(name), int)}
    if len(head_dims) > 1:
        problems.append(f"{', '.join(widths)} must be one number, and are {sorted(head_dims)}")
    if problems:
        raise ValueError(f"{file.path}: {'; '.join(problems)}")
    names = {field: key(name) for field, name in (_REQUIRED | _OPTIONAL).items()}
    raw = {field: _shortest(metadata[name]) for field, name in names.items() if name in metadata}
    return raw | {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "head_dim": min(head_dims, default=None),
        "rope_scaling": _rope_scaling(file, key(_SCALING)),
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


def _rope_scaling(file: GgufFile, scaling: str) -> dict[str, Any] | None:
    """GGUF files hold Llama 3.1's scaling as one factor for each frequency."""
    kind = file.metadata.get(f"{scaling}.type", "none")
    factors = file.floats(ROPE_FACTORS)
    if factors is not None:
        if kind != "none":
            raise ValueError(f"{file.path}: {scaling}.type={shown(kind)} and {ROPE_FACTORS} exclude each other")
        return {"rope_type": "factors", "factors": list(map(_shortest, factors))}
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": _shortest(file.metadata.get(f"{scaling}.factor"))}
