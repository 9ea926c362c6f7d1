"""The model's constants, from a Hugging Face `config.json`. What would be computed wrongly is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "LlamaForCausalLM"
CHECKPOINT_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearScaling | Llama3Scaling
_SCALINGS: dict[str, type[LinearScaling] | type[Llama3Scaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shapes and constants of one Llama. Nothing here has a default: a checkpoint says what it is."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int  # tokens the model was trained to attend over
    tie_word_embeddings: bool  # the head is the transposed embedding
    checkpoint_dtype: str | None  # what the weights were saved in; None where the file does not say
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # generation_config.json, where there is one, knows better

    def __post_init__(self) -> None:
        problems = [f"{name}={getattr(self, name)} must be positive" for name in _POSITIVE if getattr(self, name) <= 0]
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim} is odd, but rotary embeddings turn pairs")
        if problems:
            raise ValueError("not a Llama: " + "; ".join(problems))

    @classmethod
    def from_file(cls, path: Path | str) -> LlamaConfig:
        """Reads `config.json`, given its path or its folder's."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        raw = read_object(path)
        try:
            return cls.from_hf(raw)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> LlamaConfig:
        """Translates the parsed `config.json`.

        Keys which the reference implementation of this architecture does not read are ignored here too.

        Raises:
            ValueError: one message naming everything that is missing or that this engine does not compute.
        """
        problems = _unsupported(raw)
        missing = [key for key in _REQUIRED if raw.get(key) is None]
        problems += [f"{key} is missing" for key in missing]
        problems += _mistyped(raw)
        theta, scaling, rope_problems = _rope(raw)
        problems += rope_problems
        try:
            ends = end_ids(raw)
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError(f"{len(problems)} problem(s) in the model's config: " + "; ".join(problems))
        heads = raw["num_attention_heads"]
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // max(heads, 1),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=raw["max_position_embeddings"],
            tie_word_embeddings=raw.get("tie_word_embeddings") or False,
            checkpoint_dtype=_dtype(raw),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=ends or (),
        )

    def to_hf(self) -> dict[str, Any]:
        """The inverse of `from_hf`, in the spelling that older and newer readers both take."""
        scaling = self.rope_scaling
        names = {kind: name for name, kind in _SCALINGS.items()}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if scaling is None else {"rope_type": names[type(scaling)], **vars(scaling)},
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": self.checkpoint_dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
            "attention_bias": False,
            "mlp_bias": False,
        }


_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "max_position_embeddings",
)  # fmt: skip
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
_TYPES: dict[type[int] | type[float] | type[bool], tuple[str, ...]] = {
    int: (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "bos_token_id",
    ),
    float: ("rms_norm_eps",),
    bool: ("tie_word_embeddings",),
}  # fmt: skip


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object. ValueError, naming the file, where it holds something else."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return raw


def end_ids(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """`eos_token_id` of a config or generation config, one id or several; None where it does not say."""
    eos = raw.get("eos_token_id")
    listed = eos if isinstance(eos, list) else [eos]
    if eos is None:
        return None
    if not all(_is_a(int, id) for id in listed):
        raise ValueError(f"eos_token_id={eos!r} is neither an integer nor a list of integers")
    return tuple(listed)


def _is_a(kind: type[int] | type[float] | type[bool], value: Any) -> bool:
    """As JSON has it: true is no number, and an integer is one."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else int)


def _mistyped(raw: Mapping[str, Any]) -> list[str]:
    names = {int: "an integer", float: "a number", bool: "true or false"}
    return [
        f"{key}={raw[key]!r} is not {names[kind]}"
        for kind, keys in _TYPES.items()
        for key in keys
        if raw.get(key) is not None and not _is_a(kind, raw[key])
    ]


def _unsupported(raw: Mapping[str, Any]) -> list[str]:
    """What would be computed wrongly, each with what would be right."""
    problems = []
    architectures = raw.get("architectures") or [ARCHITECTURE if raw.get("model_type") == "llama" else None]
    if list(architectures) != [ARCHITECTURE]:
        problems.append(f"architectures={architectures} is not supported (only {ARCHITECTURE} is)")
    expected = {
        "model_type": ("llama",),
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
        "partial_rotary_factor": (1, 1.0),
        "quantization_config": (),
        "dtype": CHECKPOINT_DTYPES,
        "torch_dtype": CHECKPOINT_DTYPES,
    }
    for key, values in expected.items():
        value = raw.get(key)
        if value is not None and value not in values:
            problems.append(f"{key}={value!r} is not supported (only {list(values) or 'none'})")
    return problems


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None, list[str]]:
    """theta, scaling and problems, from `rope_theta` + `rope_scaling` or from the newer `rope_parameters`."""
    spellings = [raw.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    if not all(isinstance(spelling, dict) for spelling in spellings):
        return 0.0, None, ["rope_parameters and rope_scaling must be objects"]
    new, old = (_without_theta(spelling) for spelling in spellings)
    problems = []
    if new and old and new != old:
        problems.append(f"rope_parameters={new} and rope_scaling={old} disagree")
    given = [spelling["rope_theta"] for spelling in [raw, *spellings] if spelling.get("rope_theta") is not None]
    if any(not _is_a(float, theta) or theta != given[0] for theta in given):
        return 0.0, None, [*problems, f"rope_theta must be one number, and is given as {given}"]
    # 10000 is what the reference implementation takes where neither spelling gives a base.
    theta = float(given[0] if given else 10_000)
    rope = new or old
    kind = rope.pop("rope_type", "default")
    if rope.pop("partial_rotary_factor", None) not in (None, 1, 1.0):
        problems.append("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None, problems
    if kind not in _SCALINGS:
        problems.append(f"rope_type={kind!r} is not supported (only {['default', *_SCALINGS]})")
        return theta, None, problems
    values = {name: rope.get(name) for name in _SCALINGS[kind].__dataclass_fields__}
    if absent := [name for name, value in values.items() if value is None]:
        problems.append(f"rope_type={kind!r} lacks {absent}")
    elif wrong := [name for name, value in values.items() if not (_is_a(float, value) and value > 0)]:
        problems.append(f"rope_type={kind!r} needs positive numbers for {wrong}")
    elif kind == "llama3" and not values["low_freq_factor"] < values["high_freq_factor"]:
        problems.append(f"rope_type={kind!r} needs low_freq_factor below high_freq_factor")
    return theta, None if problems else _SCALINGS[kind](**values), problems


def _without_theta(spelling: dict[str, Any]) -> dict[str, Any]:
    """The scaling alone, its kind by its newer name; empty where the base was all."""
    rest = {key: value for key, value in spelling.items() if key not in ("rope_theta", "type")}
    kind = spelling.get("rope_type") or spelling.get("type")
    return rest | ({"rope_type": kind} if kind else {})


def _dtype(raw: Mapping[str, Any]) -> str | None:
    return raw.get("dtype") or raw.get("torch_dtype")
