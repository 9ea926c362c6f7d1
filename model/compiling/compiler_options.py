"""XLA's options for the compiled step.

On GPUs the step is captured in CUDA graphs with its loops and branches, except for its collectives. A loop outside of a
graph would make the host wait for its condition in each pass. XLA's autotuner chooses between Triton and cuBLASLt for
each product. An option of its own lets a product dequantise a 4-bit kernel with the scales of its groups;
without it, the kernel is written out. The allocator maps the temporaries of a program at addresses that stay
(`GPU_ALLOCATOR`), so its graph need not be updated for them.

On TPUs, weights keep the tiles in which they arrive. Otherwise the compiler for tpu7x would copy the weights of a head
that drafts into larger tiles before its loops, in every step.

On CPUs XLA may change the order of additions, so that it can vectorise loops. The order is the same in every run. The
other liberties of "fast math" are switched off: NaN and infinity are kept.

The figures behind each choice are in `scripts/lab/results/decisions.md`.
"""

from __future__ import annotations

import os

ALLOCATOR_VARIABLE = "XLA_PYTHON_CLIENT_ALLOCATOR"  # jax reads it when it starts on a GPU
GPU_ALLOCATOR = "vmm"  # reserves virtual addresses and maps memory to them

_CPU_OPTIONS: dict[str, str | bool] = {
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_fast_math_honor_nans": True,
    "xla_cpu_fast_math_honor_infs": True,
    "xla_cpu_fast_math_honor_division": True,
    "xla_cpu_fast_math_honor_functions": True,
}
_GRAPH_COMMANDS = (
    "FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "WHILE", "CONDITIONAL"
)  # fmt: skip


_TPU_OPTIONS: dict[str, str | bool] = {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}


def compiler_options(platform: str) -> dict[str, str | bool]:
    """Options of `jax.stages.Lowered.compile` for a program on devices of `platform`."""
    if platform == "cpu":
        return _CPU_OPTIONS
    if platform == "tpu":
        return _TPU_OPTIONS
    if platform not in ("gpu", "cuda"):
        return {}
    options: dict[str, str | bool] = {
        "xla_gpu_enable_command_buffer": ",".join(_GRAPH_COMMANDS),
        "xla_gpu_enable_triton_gemm": True,
        "xla_gpu_experimental_enable_subchannel_dequantisation_fusion": True,
    }
    if os.environ.get(ALLOCATOR_VARIABLE, GPU_ALLOCATOR) == GPU_ALLOCATOR:
        options["xla_gpu_command_buffer_update_mode"] = "SKIP_TEMP"
    return options
