"""The account of a whole decode step on a TPU, in bfloat16 and in fewer bits, from `compile_tpu_step`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from scripts.benchmarks.accounts.targets import tpu_target

GIB, MIB = 1 << 30, 1 << 20


def table(target: str, preset: str, quantization: str | None, kv_dtype: str) -> str:
    """In Markdown: the step in bfloat16, and the same with weights and pages as asked for."""
    memory = tpu_target(target).chip.memory_bytes_per_s
    forms = {
        "bfloat16": [],
        f"weights {quantization or 'bfloat16'}, K/V {kv_dtype}": [
            *(("--quantization", quantization) if quantization else ()), "--kv-dtype", kv_dtype,
        ],
    }  # fmt: skip
    lines = [
        f"\n### {target}, {preset}: a decode of 64 rows of 2k, what each chip reads\n",
        "| | weights, GiB | K/V, GiB | together | of bfloat16's | us at the memory's speed | updated in place, MiB "
        "(pages) | temporaries, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    wide = None
    for name, flags in forms.items():
        a = compiled("--target", target, "--preset", preset, *flags)
        read = a["weights_read"] + a["kv_read"]
        wide = wide or read
        lines.append(
            f"| {name} | {a['weights_read'] / GIB:.2f} | {a['kv_read'] / GIB:.2f} | {read / GIB:.2f} "
            f"| {read / wide:.3f} | {read / memory * 1e6:.0f} | {a['alias_bytes'] / MIB:.0f} "
            f"({a['kv_bytes'] / MIB:.0f}) | {a['temp_bytes'] / MIB:.1f} |"
        )
    return "\n".join(lines)


def compiled(*flags: str) -> dict[str, Any]:
    """In a process of its own: libtpu is loaded for one target."""
    process = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks.accounts.compile_tpu_step", *flags],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"{' '.join(flags)} does not compile: {process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])
