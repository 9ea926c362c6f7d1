"""Converts a checkpoint to the form in which it is served, for a quick start:

    python -m scripts.convert_checkpoint MODEL FOLDER --tensor-parallel-size 8
    scripts/serve --model FOLDER --tensor-parallel-size 8

FOLDER becomes a model of its own: the config and tokenizer files, and `orbax/` with fused weights cut for that many
chips. The chips are not needed: the conversion runs on the CPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from model.source import ModelSource, resolve

ORBAX = "orbax"
DTYPES = ("bfloat16", "float32")
_BESIDE = ("*.json", "*.jinja", "tokenizer.model")
_NOT_BESIDE = ("model.safetensors.index.json",)  # it would name files that stay behind


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a hub name")
    parser.add_argument("folder", type=Path, help="where to write; new or empty")
    parser.add_argument("--revision", help="of a hub model")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="chips that will serve it")
    args = parser.parse_args(arguments)
    try:
        source = resolve(args.model, revision=args.revision)
        if source.folder is None:
            raise ValueError(f"{args.model} has no weights to convert")
        convert(source, source.folder, args.folder, dtype=args.dtype, num_shards=args.tensor_parallel_size)
    except ValueError as error:
        sys.exit(f"convert_checkpoint: {error}")


def convert(source: ModelSource, origin: Path, folder: Path, *, dtype: str, num_shards: int) -> None:
    """`origin` is the folder of `source`, which has weights."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder")
    import jax

    jax.config.update("jax_platforms", "cpu")
    if num_shards > 1:
        jax.config.update("jax_num_cpu_devices", num_shards)
    from model.checkpoint import save_orbax
    from model.sharding import make_mesh
    from model.weights import load_hf

    started = time.perf_counter()
    mesh = make_mesh(num_shards) if num_shards > 1 else None
    model = load_hf(origin, source.config, dtype=dtype, mesh=mesh)
    loaded = time.perf_counter()
    save_orbax(model, folder / ORBAX, source.config)
    for pattern in _BESIDE:
        for path in sorted(origin.glob(pattern)):
            if path.name not in _NOT_BESIDE:
                shutil.copyfile(path, folder / path.name)
    written = time.perf_counter()
    print(f"{folder}: read in {loaded - started:.1f} s, written in {written - loaded:.1f} s")


if __name__ == "__main__":
    main()
