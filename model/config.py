"""The model's constants, from a Hugging Face `config.json`. A setting that this engine does not support is refused.

The tests compare with `transformers.LlamaConfig`, but this module does not use it. Its import adds 0.9 s to the
engine's start, even in a thread next to jax's import (2.4 s of processor time instead of 1.4 s). The HTTP process reads
the file before its port is bound. `transformers.LlamaConfig` also reports only the first of several problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from model.families import FAMILIES, LLAMA, Family
from model.inputs.json_file import read_object
from model.inputs.limits import MAX_VOCAB_SIZE
from model.inputs.schema import TEXT, TRUTH, check, described_as, integer, number, unsupported
from model.inputs.words import shown
from model.quantization.checkpoint_form import kv_scale_type, read_form
from model.quantization.forms import EightBit
from model.quantization.stored_form import StoredForm

CHECKPOINT_DTYPES = ("bfloat16", "float16", "float32")
MODELOPT_CONFIG = "hf_quant_config.json"
DEFAULT_THETA = 10_000.0  # the base in `transformers` if a config gives none

_Size = Annotated[int, integer(1, 1 << 24)]
_Count = Annotated[int, integer(1, 1 << 16)]
_Tokens = Annotated[int, integer(1, 1 << 30)]  # positions are int32 on the device
_End = Annotated[int | list[int], described_as("an integer or a list of integers")]
# Within these bounds no frequency overflows float32 and none is NaN.
_Factor = Annotated[float, number(1e-6, 1e9)]
_Theta = Annotated[float, number(1e-6, 1e30)]


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


@dataclass(frozen=True, kw_only=True)
class FactorScaling:
    """Every frequency divided by a factor of its own, as GGUF files hold Llama 3.1's scaling."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | FactorScaling
_SCALINGS: dict[str, type[LinearScaling] | type[Llama3Scaling] | type[FactorScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "factors": FactorScaling,
}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shapes and constants of one decoder. They come from the checkpoint and have no defaults."""

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
    checkpoint_dtype: str | None  # dtype of the saved weights; None if the file does not give it
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # the ids in generation_config.json take precedence
    quantized: StoredForm | None = None  # the form of the checkpoint's projections if they are quantised
    kv_scale_type: EightBit = EightBit.FP8  # the type of 8-bit K/V for which the checkpoint's K/V scales are
    model_type: str = LLAMA.model_type  # the name of the family in `FAMILIES`

    def __post_init__(self) -> None:
        problems = [f"{name}={getattr(self, name)} must be positive" for name in _POSITIVE if getattr(self, name) <= 0]
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim} is odd, but rotary embeddings turn pairs")
        scaling = self.rope_scaling
        if isinstance(scaling, FactorScaling) and len(scaling.factors) != self.head_dim // 2:
            problems.append(f"{len(scaling.factors)} rope factors are given for {self.head_dim // 2} frequencies")
        problems += end_id_problems(self.eos_token_ids, self.vocab_size)
        if problems:
            raise ValueError(f"not a model of {self.family.architecture}: " + "; ".join(problems))

    @property
    def projection_inputs(self) -> tuple[int, int, int]:
        """The numbers of inputs of the projections: first of qkv and gate_up, then of out, then of down."""
        return self.hidden_size, self.num_heads * self.head_dim, self.intermediate_size

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a layer's tensors (`LayerTensor.shape`), by name."""
        embed, queries, mlp = self.projection_inputs
        keys = self.num_kv_heads * self.head_dim
        return {"embed": embed, "queries": queries, "keys": keys, "mlp": mlp, "head": self.head_dim}

    @property
    def family(self) -> Family:
        """The family of decoders to which the model belongs."""
        return FAMILIES[self.model_type]

    @property
    def projections(self) -> tuple[str, ...]:
        """The checkpoint's names of the modules with a weight matrix, without the head and the embedding."""
        return self.family.projections(self.num_layers)

    @classmethod
    def from_file(cls, path: Path | str) -> LlamaConfig:
        """Reads `config.json`, next to which ModelOpt's file may describe quantised weights. `path` is the file or its
        folder."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        raw = read_object(path)
        if raw.get("quantization_config") is None and (beside := path.with_name(MODELOPT_CONFIG)).exists():
            found = read_object(beside).get("quantization")
            raw["quantization_config"] = {"quant_method": "modelopt"} | found if isinstance(found, dict) else found
        try:
            return cls.from_hf(raw)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> LlamaConfig:
        """Translates the parsed `config.json`.

        Keys that the reference implementation of this architecture does not read are ignored here, too.

        Raises:
            ValueError: one message lists every missing field and every setting that this engine does not compute.
        """
        family, problems = _family(raw)
        file, found = check(raw, _ConfigFile)
        theta, scaling, rope_problems = _rope(raw)
        quantization = raw.get("quantization_config")
        quantized, quantization_problems = (None, []) if quantization is None else read_form(quantization)
        problems += found + rope_problems + quantization_problems
        if file is None or problems:
            raise ValueError(f"{len(problems)} problem(s) in the model's config: " + "; ".join(problems))
        file.num_kv_heads = file.num_kv_heads or file.num_heads
        file.head_dim = file.head_dim or file.hidden_size // file.num_heads
        file.tie_word_embeddings = file.tie_word_embeddings or False
        return cls(
            **{name: getattr(file, name) for name in _UNCHANGED.values()},
            rope_theta=theta,
            rope_scaling=scaling,
            checkpoint_dtype=raw.get("dtype") or raw.get("torch_dtype"),
            eos_token_ids=end_ids(file) or (),
            quantized=quantized,
            kv_scale_type=kv_scale_type(quantization),
            model_type=family.model_type,
        )

    def to_hf(self) -> dict[str, Any]:
        """The inverse of `from_hf`, with the field names that older and newer readers both accept."""
        scaling = self.rope_scaling
        names = {kind: name for name, kind in _SCALINGS.items()}
        return {
            "architectures": [self.family.architecture],
            "model_type": self.model_type,
            **{key: getattr(self, name) for key, name in _UNCHANGED.items()},
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": None if scaling is None else {"rope_type": names[type(scaling)], **vars(scaling)},
            "torch_dtype": self.checkpoint_dtype,
            "eos_token_id": list(self.eos_token_ids) or None,
            "attention_bias": False,
            "mlp_bias": False,
        }


_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "max_position_embeddings",
)  # fmt: skip


class _ConfigFile(msgspec.Struct, kw_only=True):
    """The fields of `config.json` that need no translation. `_RopeFields` has those of rotary embeddings."""

    vocab_size: Annotated[int, integer(1, MAX_VOCAB_SIZE)]
    hidden_size: _Size
    intermediate_size: _Size
    num_layers: _Count = msgspec.field(name="num_hidden_layers")
    num_heads: _Count = msgspec.field(name="num_attention_heads")
    num_kv_heads: _Count | None = msgspec.field(name="num_key_value_heads", default=None)
    head_dim: _Count | None = None
    rms_norm_eps: Annotated[float, described_as("a number above 0 and below 1", gt=0, lt=1)]
    max_position_embeddings: _Tokens
    tie_word_embeddings: TRUTH | None = None
    bos_token_id: Annotated[int, described_as("an integer")] | None = None
    eos_token_id: _End | None = None


# The fields of `LlamaConfig` that have the values of the file, by their names in it.
_UNCHANGED = {
    field.encode_name: field.name for field in msgspec.structs.fields(_ConfigFile) if field.name != "eos_token_id"
}


class _RopeFields(msgspec.Struct):
    """`rope_parameters` or `rope_scaling`."""

    rope_type: TEXT | None = None
    type: TEXT | None = None  # the older name of `rope_type`
    rope_theta: _Theta | None = None
    factor: _Factor | None = None
    factors: Annotated[tuple[_Factor, ...], described_as("a list of numbers from 1e-06 to 1e+09")] | None = None
    low_freq_factor: _Factor | None = None
    high_freq_factor: _Factor | None = None
    original_max_position_embeddings: _Tokens | Annotated[float, number(1, 1 << 30)] | None = None
    partial_rotary_factor: Annotated[float, described_as("1 (another share is not supported)", ge=1, le=1)] | None = (
        None
    )

    @property
    def kind(self) -> str:
        return next(kind for kind in (self.rope_type, self.type, "default") if kind is not None)


class GenerationFile(msgspec.Struct):
    """The fields of `generation_config.json` that the model uses."""

    eos_token_id: _End | None = None


def end_ids(file: _ConfigFile | GenerationFile) -> tuple[int, ...] | None:
    """`eos_token_id`, one id or several; None if the file does not have it."""
    eos = file.eos_token_id
    return (eos,) if isinstance(eos, int) else None if eos is None else tuple(eos)


def end_id_problems(ids: Sequence[int], vocab_size: int) -> list[str]:
    """The problem of end ids outside the vocabulary: the model can never draw them, so its text would not end."""
    outside = [id for id in ids if not 0 <= id < vocab_size]
    return [f"eos_token_id={shown(outside)} is not in the vocabulary of {vocab_size} ids"] if outside else []


def _family(raw: Mapping[str, Any]) -> tuple[Family, list[str]]:
    """The family that the config names, and the settings that this engine does not compute, each with the supported
    values. The settings of an unknown family are compared with Llama's."""
    problems = []
    by_type = [family.architecture for family in FAMILIES.values() if family.model_type == raw.get("model_type")]
    architectures = raw.get("architectures") or by_type or [None]
    family = next((family for family in FAMILIES.values() if architectures == [family.architecture]), None)
    if family is None:
        supported = " or ".join(family.architecture for family in FAMILIES.values())
        problems.append(f"architectures={shown(architectures)} is not supported (only {supported} is)")
        family = LLAMA
    expected = {
        "model_type": (family.model_type,),
        **family.settings,
        "dtype": CHECKPOINT_DTYPES,
        "torch_dtype": CHECKPOINT_DTYPES,
    }
    problems += unsupported(raw, {key: (None, *values) for key, values in expected.items()})
    return family, problems


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None, list[str]]:
    """theta, scaling and problems, from `rope_theta` + `rope_scaling` or from the newer `rope_parameters`.

    If both are given, `transformers` ignores `rope_parameters`. Here both must mean the same.
    """
    spellings = {key: raw.get(key) or {} for key in ("rope_parameters", "rope_scaling")}
    if not all(isinstance(spelling, dict) for spelling in spellings.values()):
        return 0.0, None, ["rope_parameters and rope_scaling must be objects"]
    base, problems = check({"rope_theta": raw.get("rope_theta")}, _RopeFields)
    read: list[_RopeFields] = []
    for key, spelling in spellings.items():
        fields, found = check(spelling, _RopeFields)
        problems += [f"{key}.{problem}" for problem in found]
        read += [] if fields is None else [fields]
    if base is None or problems:
        return 0.0, None, problems
    bases = (base.rope_theta, *(fields.rope_theta for fields in read))
    thetas = [theta for theta in bases if theta is not None]
    if any(theta != thetas[0] for theta in thetas):
        problems.append(f"rope_theta must be one number, and is given as {thetas}")
    given = [fields for fields, spelling in zip(read, spellings.values(), strict=True) if spelling] or [_RopeFields()]
    meanings = [(fields.rope_theta or base.rope_theta or DEFAULT_THETA, *_scaling(fields)) for fields in given]
    if any(meaning != meanings[0] for meaning in meanings):
        values = " and ".join(f"{key}={shown(spelling)}" for key, spelling in spellings.items())
        problems.append(f"{values} disagree")
    theta, scaling, found = meanings[0]
    return theta, scaling, problems + found


def _scaling(rope: _RopeFields) -> tuple[RopeScaling | None, list[str]]:
    kind = rope.kind
    if kind == "default":
        return None, []
    if kind not in _SCALINGS:
        return None, [f"rope_type={shown(kind)} is not supported (only {['default', *_SCALINGS]})"]
    values: dict[str, Any] = {name: getattr(rope, name) for name in _SCALINGS[kind].__dataclass_fields__}
    if absent := [name for name, value in values.items() if value is None]:
        return None, [f"rope_type={kind!r} lacks {absent}"]
    if kind == "llama3" and not values["low_freq_factor"] < values["high_freq_factor"]:
        return None, [f"rope_type={kind!r} needs low_freq_factor below high_freq_factor"]
    return _SCALINGS[kind](**values), []
