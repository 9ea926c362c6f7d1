"""The GPU attention kernels: by the compilers' account, and on a chip.

    python -m scripts.lab kernels --target h200 --static [--model 8b] [--json FILE] [--markdown FILE]
    python -m scripts.lab kernels --target h200 --device [--model 8b] [--json FILE] [--markdown FILE]
    python -m scripts.lab kernels --target h200 --static --step llama-3.1-8b --quantization fp8 --kv-cache-dtype fp8

`--static` compiles for the chip without having it and prints registers, spills, shared memory, CTAs per multiprocessor
and what the inner loops issue per block of keys, next to the cycles in which the memory delivers the block: a bound, no
time. `--kv-cache-dtype` is the type of their pages. `--device` measures on the attached chip: see
`device/device_gpu.py`. `--step` compiles a whole decode step of a model, and the same in bfloat16, and prints what each
reads.

The loops are read from SASS by NVIDIA's nvdisasm, which `scripts/test --all` installs (package nvidia-cuda-nvdisasm);
`--cuda-root` names another folder with bin/nvdisasm and bin/ptxas, such as a CUDA toolkit's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from model.inputs.paths import local_path
from model.quantization.forms import FORM_NAMES
from scripts.lab.accounts import step_table

KV_DTYPES = {"auto": "bfloat16", "fp8": "float8_e4m3fn", "int8": "int8"}
MODELS = {  # query heads, KV heads, head dim, as one chip sees them
    "1b": (32, 8, 64),
    "3b": (24, 8, 128),
    "8b": (32, 8, 128),
    "70b/8": (8, 1, 128),
}


def measure(target: str, static: bool, rest: list[str]) -> None:
    """`lab kernels` for a GPU; `rest` are the flags that it has not read."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.lab kernels --target GPU",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--device", action="store_true", help="measure on the attached chip")
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="auto", help="of the pages (auto: bfloat16)")
    parser.add_argument("--step", metavar="PRESET", help="a whole decode step of this model, next to bfloat16's")
    parser.add_argument("--quantization", choices=FORM_NAMES, help="of the step's weights (default: bfloat16)")
    parser.add_argument("--cuda-root", type=local_path, help="a folder with bin/nvdisasm and bin/ptxas")
    parser.add_argument("--json", type=local_path, help="write the figures here, too")
    parser.add_argument("--markdown", type=local_path, help="write the report here, too")
    args = parser.parse_args(rest)
    if static == args.device:
        parser.error("say --static or --device")
    if args.device and args.kv_cache_dtype != "auto":
        parser.error("--device measures pages of bfloat16: leave --kv-cache-dtype out")
    heads = MODELS[args.model]
    if args.step:
        print(step_table.table(target, args.step, args.quantization, ["--kv-cache-dtype", args.kv_cache_dtype]))
        return
    if static:
        from scripts.lab.accounts import static_gpu

        figures, lines = static_gpu.account(target, args.model, heads, KV_DTYPES[args.kv_cache_dtype], args.cuda_root)
    else:
        from scripts.lab.chip import device_gpu

        figures, lines = device_gpu.measure(target, args.model, heads)
    publish(figures, lines, args.json, args.markdown)


def publish(figures: Any, lines: list[str], json_path: Path | None, markdown_path: Path | None) -> None:
    """Prints the report, and writes the report and the figures to the given files."""
    print("\n".join(lines))
    if json_path:
        json_path.write_text(json.dumps(figures, indent=1) + "\n")
    if markdown_path:
        markdown_path.write_text("\n".join(lines) + "\n")
