"""Writes `packed.npz` next to this file: kernels that public packers have packed, and the weights that they stand for.

Not part of the product and not run by the tests: needs torch, `compressed-tensors` (0.17.0; 0.20.1 for NVFP4) and vLLM
(0.32.0), whose packers of AWQ and GPTQ write what AutoAWQ and AutoGPTQ write.

    python -m tests.model.goldens.make_packed

Arrays are named `case/tensor`; `case/weights` are float32, and `case/config` is the `quantization_config` as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor, IntQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack, pack_cols, quantize_weights
from vllm.scalar_type import scalar_types

FILE = Path(__file__).parent / "packed.npz"
SHAPE, GROUP, BLOCK = (32, 32), 16, (16, 8)  # of a kernel [out, in]

Case = tuple[str, dict[str, Any], dict[str, torch.Tensor], torch.Tensor]


def main() -> None:
    """The command."""
    torch.manual_seed(0)
    arrays: dict[str, np.ndarray] = {}
    for name, config, tensors, weights in (*compressed_tensors(), *nvfp4(), *awq(), *gptq()):
        arrays[f"{name}/config"] = np.array(json.dumps(config))
        arrays[f"{name}/weights"] = weights.float().numpy()
        for key, tensor in tensors.items():
            is_fp8 = tensor.dtype == torch.float8_e4m3fn
            arrays[f"{name}/{key}"] = (tensor.view(torch.uint8) if is_fp8 else tensor).numpy()
    np.savez_compressed(FILE, **arrays)


def compressed_tensors() -> Iterator[Case]:
    """What the library compresses and decompresses."""
    of_groups = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    for name, compressor, options in (
        ("ct int4", PackedQuantizationCompressor, of_groups | {"symmetric": True}),
        ("ct int4 zeros", PackedQuantizationCompressor, of_groups | {"symmetric": False}),
        ("ct int4 actorder", PackedQuantizationCompressor, of_groups | {"symmetric": True, "actorder": "group"}),
        ("ct int8 packed", PackedQuantizationCompressor, of_groups | {"num_bits": 8, "symmetric": True}),
        ("ct int4 rows", PackedQuantizationCompressor, {"num_bits": 4, "type": "int", "strategy": "channel"}),
        ("ct int8", IntQuantizationCompressor, {"num_bits": 8, "type": "int", "strategy": "channel"}),
        ("ct fp8", FloatQuantizationCompressor, {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("ct fp8 tensor", FloatQuantizationCompressor, {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        (
            "ct fp8 blocks",
            FloatQuantizationCompressor,
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(BLOCK)},
        ),
    ):
        settings = QuantizationArgs(**options)
        scheme = QuantizationScheme(targets=["Linear"], weights=settings)
        weight = torch.randn(SHAPE)
        order = torch.randperm(SHAPE[1]) if options.get("actorder") else torch.arange(SHAPE[1])
        given = {"weight": weight} | _scales(weight[:, order], settings)
        if options.get("actorder"):
            given["weight_g_idx"] = torch.empty(SHAPE[1], dtype=torch.int32)
            given["weight_g_idx"][order] = (torch.arange(SHAPE[1]) // GROUP).int()
        stored = compressor.compress(given, scheme)
        weights = compressor.decompress(stored, scheme)["weight"]
        group = {"targets": ["Linear"], "weights": options, "input_activations": None}
        layout = {PackedQuantizationCompressor: "pack-quantized", IntQuantizationCompressor: "int-quantized"}
        config = {
            "quant_method": "compressed-tensors",
            "format": layout.get(compressor, "float-quantized"),
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
        yield name, config, stored, weights


def nvfp4() -> Iterator[Case]:
    """What the library packs and unpacks. The weights are float32, as its own decompression has bfloat16 only."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.utils.helpers import generate_gparam

    options = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": GROUP, "symmetric": True}
    settings = QuantizationArgs(**options, scale_dtype=torch.float8_e4m3fn)
    weight = torch.randn(SHAPE)
    total = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
    parts = weight.reshape(SHAPE[0], -1, GROUP).amin(2), weight.reshape(SHAPE[0], -1, GROUP).amax(2)
    scale, _ = calculate_qparams(*parts, settings, global_scale=total)
    scheme = QuantizationScheme(targets=["Linear"], weights=settings)
    given = {"weight": weight, "weight_scale": scale, "weight_global_scale": total}
    stored = NVFP4PackedCompressor.compress(given, scheme)
    values = unpack_fp4_from_uint8(stored["weight_packed"], *SHAPE, dtype=torch.float32)
    scales = stored["weight_scale"].float() / total
    group = {"targets": ["Linear"], "weights": options, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
    yield (
        "ct nvfp4",
        config | {"config_groups": {"group_0": group}},
        stored,
        values * scales.repeat_interleave(GROUP, 1),
    )


def _scales(weight: torch.Tensor, settings: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Of the neighbouring inputs of each group."""
    rows, columns = weight.shape
    match settings.strategy:
        case "group":
            parts = weight.reshape(rows, -1, GROUP).amin(2), weight.reshape(rows, -1, GROUP).amax(2)
        case "channel":
            parts = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            cut = weight.reshape(rows // BLOCK[0], BLOCK[0], columns // BLOCK[1], BLOCK[1])
            parts = cut.amin((1, 3)), cut.amax((1, 3))
        case _:
            parts = weight.amin().reshape(1), weight.amax().reshape(1)
    scale, zero = calculate_qparams(*parts, settings)
    return {"weight_scale": scale} | ({} if settings.symmetric else {"weight_zero_point": zero.to(torch.int8)})


def awq() -> Iterator[Case]:
    """vLLM's packer, of a kernel [in, out]."""
    num_out, num_in = SHAPE
    wide, values, scales, zeros = quantize_weights(torch.randn(num_in, num_out), scalar_types.uint4, GROUP, True)
    tensors = {
        "qweight": awq_pack(values, 4, num_in, num_out),
        "qzeros": awq_pack(zeros, 4, num_in // GROUP, num_out),
        "scales": scales,
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    yield "awq", config, tensors, wide.T


def gptq() -> Iterator[Case]:
    """vLLM's packer, of a kernel [in, out]."""
    num_out, num_in = SHAPE
    groups = (torch.arange(num_in) // GROUP).int()
    for bits, symmetric in (4, scalar_types.uint4b8), (8, scalar_types.uint8b128):
        wide, values, scales, _ = quantize_weights(torch.randn(num_in, num_out), symmetric, GROUP)
        tensors = {"qweight": gptq_pack(values, bits, num_in, num_out), "scales": scales, "g_idx": groups}
        config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": True, "desc_act": False}
        yield f"gptq int{bits}", config, tensors, wide.T
    wide, values, scales, zeros = quantize_weights(torch.randn(num_in, num_out), scalar_types.uint4, GROUP, True)
    for version, less in (("gptq", 1), ("gptq_v2", 0)):
        if less and not bool((zeros > 0).all()):
            continue
        packed = pack_cols(zeros - less, 4, num_in // GROUP, num_out)
        tensors = {
            "qweight": gptq_pack(values, 4, num_in, num_out),
            "scales": scales,
            "qzeros": packed,
            "g_idx": groups,
        }
        config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
        yield f"{version} zeros", config | {"checkpoint_format": version}, tensors, wide.T


if __name__ == "__main__":
    main()
