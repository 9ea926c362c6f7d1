"""The attention kernels: by their compilers' account, and on a chip.

    python -m scripts.lab kernels --target v6e:1x1 --static             every Llama shape, the chosen block sizes
    python -m scripts.lab kernels --target v6e:1x1 --static --sweep     tries block sizes, keeps the best in tuned/
    python -m scripts.lab kernels --target h200 --static                what the kernels use, and their inner loops
    python -m scripts.lab kernels --target h200 --device                measures on the attached chip (`chip/speed.py`)
    python -m scripts.lab kernels --target h200 --static --step llama-3.1-8b --quantization fp8 --kv-cache-dtype fp8

`--static` compiles for the chip without having it. How far its figures can be trusted is said in
`accounts/tpu_static.py` and `accounts/static_gpu.py`. `--step` compiles a whole decode step of a model, and the same in
bfloat16, and prints what each reads; for a TPU also what one layer does besides its kernels, in a decode step and in a
prefill.

The loops of GPU kernels are read from SASS by NVIDIA's nvdisasm, which `scripts/test --all` installs (package
nvidia-cuda-nvdisasm); `--cuda-root` names another folder with bin/nvdisasm and bin/ptxas, such as a CUDA toolkit's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from model.inputs.paths import local_path
from model.quantization.forms import FORM_NAMES
from pallas_kernels.chips import GPUS, TPUS
from scripts.lab.accounts.process import printed_by
from scripts.lab.accounts.specs import KV_DTYPES, MODELS
from scripts.lab.tables import Table, head

GIB, MIB = 1 << 30, 1 << 20
GLUE_TOKENS = (64, 2048)  # a decode step, and a prefill
OF_TPUS, OF_GPUS = ("decode", "mixed", "few", "no_shipped", "sweep"), ("device", "cuda_root", "json")  # flags


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        prog="python -m scripts.lab kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--target", required=True, help="a chip: v6e:1x1, ... for TPUs; h100, ... for GPUs")
    p.add_argument("--static", action="store_true", help="compile only, and count; needs no chip")
    p.add_argument("--model", choices=MODELS, action="append", help="may be given again (TPUs: all; GPUs: 8b)")
    p.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="auto", help="of our pages (auto: bfloat16)")
    p.add_argument("--step", metavar="PRESET", help="a whole decode step of this model, next to bfloat16's")
    p.add_argument("--quantization", choices=FORM_NAMES, help="of the step's weights (default: bfloat16)")
    p.add_argument("--markdown", type=local_path, help="append the report here, too")
    tpus = p.add_argument_group("TPUs")
    tpus.add_argument("--decode", type=_sizes, action="append", help="KV_BLOCK,ITEMS to try (default: the chosen one)")
    tpus.add_argument("--mixed", type=_sizes, action="append", help="Q_BLOCK,KV_BLOCK,TILE_ROWS,TILE_TOKENS,UNITS")
    tpus.add_argument("--few", type=_sizes, action="append", help="Q_BLOCK,KV_BLOCK,TILE_TOKENS,SLOTS for few queries")
    tpus.add_argument("--no-shipped", action="store_true", help="leave out the kernel that jax ships")
    tpus.add_argument("--sweep", action="store_true", help="try the block sizes of a grid, keep the best in tuned/")
    gpus = p.add_argument_group("GPUs")
    gpus.add_argument("--device", action="store_true", help="measure on the attached chip")
    gpus.add_argument("--cuda-root", type=local_path, help="a folder with bin/nvdisasm and bin/ptxas")
    gpus.add_argument("--json", type=local_path, help="write the figures here, too")
    return p


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def check(p: argparse.ArgumentParser, args: argparse.Namespace, *, is_tpu: bool) -> None:
    """Ends the command for flags that do not go together."""
    for name in OF_GPUS if is_tpu else OF_TPUS:
        if getattr(args, name):
            p.error(f"--{name.replace('_', '-')} is for {'GPUs' if is_tpu else 'TPUs'}, not for {args.target}")
    if is_tpu and not args.static:
        p.error("say --static; scripts/check --parts speed measures, on a machine with a TPU")
    if is_tpu and args.kv_cache_dtype == "fp8":
        p.error("--kv-cache-dtype fp8 is for GPUs: the pages of TPUs have bfloat16 or int8")
    if args.static == args.device:
        p.error("say --static or --device")
    if args.device and args.kv_cache_dtype != "auto":
        p.error("--device measures pages of bfloat16: leave --kv-cache-dtype out")
    if args.sweep and (args.model or args.kv_cache_dtype != "auto"):
        p.error("--sweep is of all models in bfloat16: their entries have one source")
    if not is_tpu and len(args.model or ()) > 1:
        p.error("--model: give one for GPUs")


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    p = parser()
    args = p.parse_args(argv)
    is_tpu = args.target.split(":")[0] in TPUS
    check(p, args, is_tpu=is_tpu)
    if args.step:
        forms = ["--kv-cache-dtype", args.kv_cache_dtype]
        forms += ["--quantization", args.quantization] if args.quantization else []
        lines = step_table(args, forms)
        lines += glue_table(args, forms) if is_tpu else []
    elif is_tpu:
        from scripts.lab.accounts import tpu_report

        if args.sweep:
            tpu_report.sweep(args.target)
            return 0
        sizes = {"decode": args.decode, "mixed": args.mixed, "few": args.few}
        lines = []
        for model in args.model or MODELS:
            kv_dtype = KV_DTYPES[args.kv_cache_dtype]
            report = tpu_report.Report(args.target, model, sizes, shipped=not args.no_shipped, kv_dtype=kv_dtype)
            lines += report.lines()
    else:
        (model,) = args.model or ["8b"]
        if args.static:
            from scripts.lab.accounts import static_gpu

            kv_dtype = KV_DTYPES[args.kv_cache_dtype]
            figures, lines = static_gpu.account(args.target, model, MODELS[model], kv_dtype, args.cuda_root)
        else:
            from scripts.lab.chip import speed

            lines = []
            figures = speed.measure(args.target, MODELS[model], say=lines.append)
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
    publish([head(), *lines], args.markdown)
    return 0


def publish(lines: list[str], path: Path | None) -> None:
    """Prints the report, and appends it to the given file."""
    text = "\n".join(lines)
    print(text)
    if path:
        with path.open("a") as file:
            file.write(text + "\n")


def accounts(*flags: str) -> list[dict[str, Any]]:
    """The compiler's accounts of the steps that the flags ask for."""
    return printed_by("scripts.lab.accounts.compile_step", *flags)


def step_table(args: argparse.Namespace, forms: list[str]) -> list[str]:
    """The decode step in bfloat16, and the same with weights and pages as `forms` says."""
    memory = (TPUS | GPUS)[args.target.split(":")[0]].memory_bytes_per_s
    table = Table(
        {
            "": "", "weights, GiB": ".2f", "K/V, GiB": ".2f", "together": ".2f", "of bfloat16's": ".3f",
            "us at the memory's speed": ".0f", "updated in place, MiB (pages)": ">", "temporaries, MiB": ".1f",
        }
    )  # fmt: skip
    wide = None
    kv = "bfloat16" if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    name = f"weights {args.quantization or 'bfloat16'}, K/V {kv}"
    for form, flags in {"bfloat16": [], name: forms}.items():
        (a,) = accounts("--target", args.target, "--preset", args.step, *flags)
        read = a["weights_read"] + a["kv_read"]
        wide = wide or read
        in_place = f"{a['alias_bytes'] / MIB:.0f} ({a['kv_bytes'] / MIB:.0f})"
        sizes = [size / GIB for size in (a["weights_read"], a["kv_read"], read)]
        table.row(form, *sizes, read / wide, read / memory * 1e6, in_place, a["temp_bytes"] / MIB)
    return [f"\n### {args.target}, {args.step}: a decode of 64 rows of 2k, what each chip reads\n", *table.lines]


def glue_table(args: argparse.Namespace, forms: list[str]) -> list[str]:
    """What a layer of a TPU's steps does besides its kernels, by XLA's estimate."""
    table = Table({"tokens of the step": ">", "products": ">", "everything else": ">"})
    sizes = [f"--tokens={tokens}" for tokens in GLUE_TOKENS]
    for a in accounts("--target", args.target, "--preset", args.step, "--layers", "2", *sizes, *forms):
        table.row(a["num_tokens"], a["product_cycles"], a["glue_cycles"])
    title = f"\n### {args.target}, {args.step}: one layer without its attention kernels, estimated cycles\n"
    return [title, *table.lines]
