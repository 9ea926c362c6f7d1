"""The account of a whole step, in bfloat16 and in fewer bits, from `compile_tpu_step` or `compile_gpu_step`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from pallas_kernels.chips import GPUS, TPUS

GIB, MIB = 1 << 30, 1 << 20
GLUE_TOKENS = (64, 2048)  # a decode step, and a prefill


def table(target: str, preset: str, quantization: str | None, kv_flags: list[str]) -> str:
    """In Markdown: the step in bfloat16, and the same with weights and pages as asked for.

    Args:
        target: a GPU's name, or a TPU's with its topology.
        kv_flags: the flag of the pages' type and its value, as the family's command has it.
    """
    name = target.split(":")[0]
    memory = (TPUS | GPUS)[name].memory_bytes_per_s
    family = "tpu" if name in TPUS else "gpu"
    forms = {
        "bfloat16": [],
        f"weights {quantization or 'bfloat16'}, K/V {kv_flags[1]}": [
            *(("--quantization", quantization) if quantization else ()), *kv_flags,
        ],
    }  # fmt: skip
    lines = [
        f"\n### {target}, {preset}: a decode of 64 rows of 2k, what each chip reads\n",
        "| | weights, GiB | K/V, GiB | together | of bfloat16's | us at the memory's speed | updated in place, MiB "
        "(pages) | temporaries, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    wide = None
    for form, flags in forms.items():
        a = compiled(family, "--target", target, "--preset", preset, *flags)
        read = a["weights_read"] + a["kv_read"]
        wide = wide or read
        lines.append(
            f"| {form} | {a['weights_read'] / GIB:.2f} | {a['kv_read'] / GIB:.2f} | {read / GIB:.2f} "
            f"| {read / wide:.3f} | {read / memory * 1e6:.0f} | {a['alias_bytes'] / MIB:.0f} "
            f"({a['kv_bytes'] / MIB:.0f}) | {a['temp_bytes'] / MIB:.1f} |"
        )
    return "\n".join(lines)


def glue_table(target: str, preset: str, flags: list[str]) -> str:
    """In Markdown: what a layer of a TPU's steps does besides its kernels, by XLA's estimate."""
    lines = [
        f"\n### {target}, {preset}: one layer without its attention kernels, estimated cycles\n",
        "| tokens of the step | products | everything else |",
        "|---|---|---|",
    ]
    sizes = [flag for tokens in GLUE_TOKENS for flag in ("--tokens", str(tokens))]
    for a in accounts("tpu", "--target", target, "--preset", preset, "--layers", "2", *sizes, *flags):
        lines.append(f"| {a['num_tokens']} | {a['product_cycles']} | {a['glue_cycles']} |")
    return "\n".join(lines)


def compiled(family: str, *flags: str) -> dict[str, Any]:
    """The account of one step."""
    return accounts(family, *flags)[-1]


def accounts(family: str, *flags: str) -> list[dict[str, Any]]:
    """The accounts of all steps that the flags ask for. A process compiles for one target only."""
    process = subprocess.run(
        [sys.executable, "-m", f"scripts.lab.accounts.compile_{family}_step", *flags],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"{' '.join(flags)} does not compile: {process.stderr[-2000:]}")
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
