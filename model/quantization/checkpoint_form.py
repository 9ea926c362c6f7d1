"""The quantised checkpoints that can be read: from `quantization_config` to the layout of their tensors.

Most of them hold an 8-bit `weight` and its scales for each projection; a value is weight times scale. 4-bit weights,
and some 8-bit ones, are packed into words (`packed_form`). The settings of activations are reduced to `Activations`:
zero points of activations and bounds of their scales are ignored. The only setting of K/V that is read is the type,
because the values of K/V scales depend on it. Lists of modules that are or are not quantised are not read: the tensors
tell (`TensorFiles`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.inputs.schema import unsupported
from model.inputs.words import shown
from model.quantization.forms import NVFP4_GROUP, Activations, EightBit
from model.quantization.packed_form import Layout, PackedForm, Zeros
from model.quantization.stored_form import SCALES, Part, StoredForm

MAX_BLOCK = 1 << 16
# Values of `actorder`: either the inputs were quantised in another order but not moved, or a tensor gives their groups.
_IN_PLACE = (None, False, "weight", "static")
_BY_GROUP = ("group", "dynamic")
_TRUTHS = (None, True, False)
_DEQUANTIZE = "serve its base model with --quantization int4, or what transformers' `dequantize()` makes of this one"


@dataclass(frozen=True, kw_only=True)
class CheckpointForm(StoredForm):
    """How a checkpoint stores the weights of its projections, if each weight is one byte."""

    form: EightBit
    scale: str = "weight_scale"  # the tensor next to `weight`: one value, or one for each row or block
    block: tuple[int, int] | None = None  # rows and columns that share a scale; None: one scale per row or tensor
    activations: Activations = Activations.DYNAMIC

    @property
    def mark(self) -> str:
        return self.scale

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (rows,), (rows, 1))
        if self.block is not None:
            shapes = ((-(-rows // self.block[0]), -(-columns // self.block[1])),)
        types = ("I8",) if self.form is EightBit.INT8 else ("F8_E4M3",)
        return {"weight": Part(((rows, columns),), types), self.scale: Part(shapes, SCALES)}

    def row_scales(self, stored: np.ndarray, num_rows: int) -> np.ndarray:
        """f32[out, n]: the scales of n parts of each row, from the tensor `scale`. The last may be shorter."""
        values = stored.astype(np.float32)
        if self.block is None:
            return np.broadcast_to(values.reshape(-1, 1), (num_rows, 1))
        return values[np.arange(num_rows) // self.block[0]]


def read_form(raw: Any) -> tuple[StoredForm | None, list[str]]:
    """The form of the weights that `quantization_config` describes, or every reason why it cannot be read. None without
    a reason means that the weights are not quantised: only K/V have scales."""
    if not isinstance(raw, Mapping):
        return None, [f"quantization_config={shown(raw)} is not an object"]
    method = raw.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        advice = f"; {_DEQUANTIZE}" if method == "bitsandbytes" else ""
        only = f"(only {list(_METHODS)}){advice}"
        return None, [f"quantization_config.quant_method={shown(method)} is not supported {only}"]
    if _is_of_kv_only(raw):
        return None, _kv_bits(raw)
    found, problems = _METHODS[method](raw)
    problems = [f"quantization_config.{problem}" for problem in problems]
    return (None if problems else found), problems


def _is_of_kv_only(raw: Mapping[str, Any]) -> bool:
    """Whether only K/V have scales and no weights are quantised, as llm-compressor and ModelOpt describe it."""
    if raw["quant_method"] == "modelopt":
        return raw.get("quant_algo") is None and raw.get("kv_cache_quant_algo") == "FP8"
    is_empty = raw.get("config_groups") in (None, {})
    return raw["quant_method"] == "compressed-tensors" and is_empty and isinstance(raw.get("kv_cache_scheme"), Mapping)


def _kv_bits(raw: Mapping[str, Any]) -> list[str]:
    bits = raw.get("kv_cache_scheme", {}).get("num_bits", 8)
    name = "quantization_config.kv_cache_scheme.num_bits"
    return [] if bits == 8 else [f"{name}={shown(bits)} is not supported (only 8)"]


def kv_scale_type(raw: Any) -> EightBit:
    """The 8-bit type for which a checkpoint with this `quantization_config` stores K/V scales."""
    scheme = raw.get("kv_cache_scheme") if isinstance(raw, Mapping) else None
    is_int = isinstance(scheme, Mapping) and scheme.get("type") == "int"
    return EightBit.INT8 if is_int else EightBit.FP8


def _compressed_tensors(raw: Mapping[str, Any]) -> tuple[StoredForm | None, list[str]]:
    """Reads the format of https://github.com/neuralmagic/compressed-tensors: FP8 and INT8 with scales of tensors, rows
    or blocks, and integers packed into words with scales of rows or groups."""
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return None, ["config_groups must be an object with groups"]
    group, *others = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return None, ["config_groups must quantise weights"]
    if any(not isinstance(one, Mapping) or {**one, "targets": 0} != {**group, "targets": 0} for one in others):
        return None, ["config_groups: projections of different forms are not supported"]
    packing = group.get("format") or raw.get("format")
    if packing == "nvfp4-pack-quantized":
        found, problems = _nvfp4(Layout.NVFP4, weights, "weights.")
    elif packing == "pack-quantized":
        found, problems = _packed_rows(weights)
    else:
        found, problems = _in_bytes(weights, packing, _activations(group))
    sparsity = raw.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        problems.append("sparsity_config: sparse weights are not supported")
    return None if problems else found, problems


def _nvfp4(layout: Layout, raw: Mapping[str, Any], prefix: str = "") -> tuple[StoredForm | None, list[str]]:
    """Weights in NVFP4. Inputs keep their type, as on chips without a product of it."""
    fixed = {"num_bits": (None, 4), "type": (None, "float"), "group_size": (None, NVFP4_GROUP)}
    form = PackedForm(layout=layout, bits=4, group=NVFP4_GROUP, zeros=Zeros.MIDDLE)
    return form, unsupported(raw, fixed, prefix)


def _activations(group: Mapping[str, Any]) -> Activations:
    """How the inputs are rounded. Zero points of activations are not supported: inputs are then rounded without them,
    with a scale for each token."""
    inputs = group.get("input_activations")
    if not isinstance(inputs, Mapping):
        return Activations.EXACT
    is_static = inputs.get("dynamic") is False and inputs.get("strategy") == "tensor"
    return Activations.STATIC if is_static and inputs.get("symmetric", True) is True else Activations.DYNAMIC


def _in_bytes(
    weights: Mapping[str, Any], packing: Any, activations: Activations
) -> tuple[StoredForm | None, list[str]]:
    formats = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized")
    problems = unsupported({"format": packing}, {"format": formats})
    read = {
        "type": ("float", "int"),
        "num_bits": (8,),
        "actorder": _IN_PLACE,
        "strategy": ("tensor", "channel", "block"),
    }
    problems += unsupported(weights, read, "weights.")
    if weights.get("symmetric", True) is not True:
        problems.append("weights with zero points (symmetric: false) are not supported")
    block = None
    if weights.get("strategy") == "block":
        block, problem = _block(weights.get("block_structure"), "weights.block_structure")
        problems += problem
    form = EightBit.FP8 if weights.get("type") == "float" else EightBit.INT8
    return CheckpointForm(form=form, block=block, activations=activations), problems


def _packed_rows(weights: Mapping[str, Any]) -> tuple[StoredForm | None, list[str]]:
    read = {
        "num_bits": (4, 8),
        "type": ("int",),
        "symmetric": _TRUTHS,
        "actorder": (*_IN_PLACE, *_BY_GROUP),
        "strategy": ("group", "channel"),
    }
    problems = unsupported(weights, read, "weights.")
    group = None
    if weights.get("strategy") == "group":
        group, problem = _group(weights.get("group_size"), "weights.group_size")
        problems += problem
    if problems:
        return None, problems
    zeros = Zeros.STORED if weights.get("symmetric") is False else Zeros.MIDDLE
    is_ordered = weights.get("actorder") in _BY_GROUP
    return PackedForm(layout=Layout.ROWS, bits=weights["num_bits"], group=group, zeros=zeros, is_ordered=is_ordered), []


def _gptq(raw: Mapping[str, Any]) -> tuple[PackedForm | None, list[str]]:
    """Reads the format of AutoGPTQ and GPTQModel: https://github.com/ModelCloud/GPTQModel."""
    group, problems = _group(raw.get("group_size"), "group_size")
    versions, types = (None, "gptq", "gptq_v2"), (None, "int32")
    read = {"bits": (4, 8), "checkpoint_format": versions, "sym": _TRUTHS, "desc_act": _TRUTHS, "pack_dtype": types}
    problems += unsupported(raw, read)
    dynamic = raw.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(pattern.startswith("-:") for pattern in dynamic):
        problems.append("dynamic: projections of different forms are not supported (only '-:' for those left out)")
    if raw.get("is_marlin_format"):
        problems.append("is_marlin_format: weights in the order of one GPU's kernel are not supported")
    if problems:
        return None, problems
    stored = Zeros.STORED if raw.get("checkpoint_format") == "gptq_v2" else Zeros.LESS_ONE
    zeros = stored if raw.get("sym") is False else Zeros.MIDDLE
    is_ordered = raw.get("desc_act") is True
    return PackedForm(layout=Layout.GPTQ, bits=raw["bits"], group=group, zeros=zeros, is_ordered=is_ordered), []


def _auto_round(raw: Mapping[str, Any]) -> tuple[StoredForm | None, list[str]]:
    """Reads AutoRound's formats with the tensors of GPTQ and AWQ: https://github.com/intel/auto-round."""
    layouts = {None: _gptq, "auto_round:auto_gptq": _gptq, "auto_round:auto_awq": _awq}
    problems = unsupported(raw, {"packing_format": tuple(layouts), "data_type": (None, "int")})
    extra = raw.get("extra_config") or {}
    own = extra.values() if isinstance(extra, Mapping) else [extra]
    if any(not isinstance(one, Mapping) or one.get("bits") != 16 for one in own):
        problems.append("extra_config: projections of different forms are not supported (only 16 bits)")
    return (None, problems) if problems else layouts[raw.get("packing_format")]({**raw, "backend": None})


def _awq(raw: Mapping[str, Any]) -> tuple[PackedForm | None, list[str]]:
    """Reads the "gemm" version of AutoAWQ's format: https://github.com/casper-hansen/AutoAWQ."""
    group, problems = _group(raw.get("group_size"), "group_size")
    versions = (None, "gemm", "GEMM")
    read = {"bits": (4,), "version": versions, "zero_point": (None, True), "backend": (None, "autoawq")}
    problems += unsupported(raw, read)
    return None if problems else PackedForm(layout=Layout.AWQ, bits=4, group=group, zeros=Zeros.STORED), problems


def _fp8(raw: Mapping[str, Any]) -> tuple[CheckpointForm | None, list[str]]:
    """Reads AutoFP8's format with one scale per tensor, or the format with a `weight_scale_inv` for each block. Despite
    its name, a weight is multiplied by `weight_scale_inv`."""
    problems = unsupported(raw, {"fmt": (None, "e4m3", "float8_e4m3fn")})
    if raw.get("weight_block_size") is None:
        activations = Activations.STATIC if raw.get("activation_scheme") == "static" else Activations.DYNAMIC
        return CheckpointForm(form=EightBit.FP8, activations=activations), problems
    block, problem = _block(raw["weight_block_size"], "weight_block_size")
    return CheckpointForm(form=EightBit.FP8, scale="weight_scale_inv", block=block), problems + problem


def _fbgemm_fp8(raw: Mapping[str, Any]) -> tuple[CheckpointForm | None, list[str]]:
    return CheckpointForm(form=EightBit.FP8), []


def _modelopt(raw: Mapping[str, Any]) -> tuple[StoredForm | None, list[str]]:
    if raw.get("quant_algo") == "NVFP4":
        return _nvfp4(Layout.MODELOPT, raw)
    problems = unsupported(raw, {"quant_algo": ("FP8", "NVFP4")})
    return CheckpointForm(form=EightBit.FP8, activations=Activations.STATIC), problems


_METHODS: dict[str, Callable[[Mapping[str, Any]], tuple[StoredForm | None, list[str]]]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "modelopt": _modelopt,
    "auto-round": _auto_round,
}
# The values of `--quantization` that say how a checkpoint is stored. `fp8` is not one: it also quantises.
STORED_METHODS = (*(method for method in _METHODS if method != "fp8"), "gguf")


def _block(raw: Any, name: str) -> tuple[tuple[int, int] | None, list[str]]:
    match raw:
        case [int(rows), int(columns)] if 0 < rows <= MAX_BLOCK and 0 < columns <= MAX_BLOCK:
            return (rows, columns), []
    return None, [f"{name}={shown(raw)} is not two integers from 1 to {MAX_BLOCK}"]


def _group(raw: Any, name: str) -> tuple[int | None, list[str]]:
    """The size of a group, or None for -1, which means a whole row; and the problem with the setting, if any."""
    if isinstance(raw, int) and not isinstance(raw, bool) and (raw == -1 or 0 < raw <= MAX_BLOCK):
        return (None if raw == -1 else raw), []
    return None, [f"{name}={shown(raw)} is neither -1 nor an integer from 1 to {MAX_BLOCK}"]
