"""XLA's options for the compiled step, and why its layers and products are as they are on GPUs. In one place.

The GPU's rest on compile-only evidence: nothing here was timed on a chip. The lines are what
`scripts/benchmarks/accounts/compile_gpu_step.py` says for the H200 (64 rows, jax 0.11.2; commands and more of them in
`scripts/benchmarks/results/2026-11-21-gpu-static.md`), but for the scans, which are of a prototype of the same step.
Launches are of kernels, of cuBLASLt and of Mosaic's attention.

| step                      | layers   | products | CUDA graphs | launches in them      | temporaries |
|---------------------------|----------|----------|-------------|-----------------------|-------------|
| 8B, decode                | unrolled | Triton   | 1           | all: 373 + 0 + 64     | 31.8 MiB    |
| 8B, decode                | unrolled | cuBLASLt | 1           | all: 179 + 129 + 64   | 35.9 MiB    |
| 8B, decode (prototype)    | scan     | Triton   | 1 a layer   | the loop stays out    | 423 MiB     |
| 8B, decode (prototype)    | scan     | cuBLASLt | 1 a layer   | the loop stays out    | 38 MiB      |
| 70B on 8, collectives out | unrolled | Triton   | 161         | all but 164 reduces   | 13.1 MiB    |
| 70B on 8, collectives in  | unrolled | Triton   | 1           | all: 941 + 0 + 160    | 13.1 MiB    |

- Layers: unrolled. The whole step is one graph, launched once; a scan is launched layer by layer, and with Triton it
  copies every layer's weights out of the stack (the 423 MiB). It would save compile time only: 5 s against 2 s.
- Products: both kinds stay allowed, so that XLA's autotuner times both on the chip and takes the faster for each shape.
  Without a chip it times neither, and the table's binaries say nothing of their speed.
- Graphs: all that XLA can put in, but the collectives, by name: XLA has changed its own default more than once. With
  them in, runs on real chips became slower (openxla/xla#35360: 8 GPUs, 0.71x) or hung (marin-community/marin#8277). The
  161 launches of a 70B step are dispatched ahead of a step that reads 17 GB of weights on each chip, 3.7 ms at
  4.8 TB/s: one graph in their place promises little. To be measured when 8 GPUs are at hand.

On CPUs sums may be added in another order (never another order from run to run), which is what lets the loops of
`cpu_products` and of the reference's attention be vectorised: all that "fast math" may not do besides is spelled
out, and NaN and infinity stay what they are. Measured on a step of 107 M parameters in float32, 4 rows: 25 ms with it,
46 without.
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
