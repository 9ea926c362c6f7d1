"""XLA's options for the compiled step.

On GPUs the step is captured in CUDA graphs, except for its collectives, and XLA's autotuner chooses between Triton and
cuBLASLt for each product. On CPUs sums may be added in another order than the program's, which is what lets loops be
vectorised. The order is the same in every run, and NaN and infinity are kept: "fast math" may do nothing else.

The figures behind each choice are in `scripts/benchmarks/results/decisions.md`.
"""

from __future__ import annotations

_CPU_OPTIONS: dict[str, str | bool] = {
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_fast_math_honor_nans": True,
    "xla_cpu_fast_math_honor_infs": True,
    "xla_cpu_fast_math_honor_division": True,
    "xla_cpu_fast_math_honor_functions": True,
}
_GRAPH_COMMANDS = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION")


def compiler_options(platform: str) -> dict[str, str | bool]:
    """For `jax.stages.Lowered.compile`. `platform`: of the devices that the program is for."""
    if platform == "cpu":
        return _CPU_OPTIONS
    if platform not in ("gpu", "cuda"):
        return {}
    return {"xla_gpu_enable_command_buffer": ",".join(_GRAPH_COMMANDS), "xla_gpu_enable_triton_gemm": True}
