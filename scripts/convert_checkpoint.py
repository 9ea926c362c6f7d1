"""Converts a checkpoint to the form in which it is served, for a quick start:

    python -m scripts.convert_checkpoint MODEL FOLDER
    scripts/serve --model FOLDER --tensor-parallel-size 8

FOLDER becomes a complete model: the config and tokenizer files, and `orbax/` with the weights. Orbax alone opens
`orbax/arrays`, where every parameter has its name. Any number of chips and hosts that the model divides over can load
the weights: each host reads only what its chips hold. Without `--dtype` and
`--quantization` no value changes: float32 stays float32, bfloat16 stays bfloat16, and other types become float32, which
holds float16 and bfloat16 exactly. The chips are not needed: the conversion runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config import MODELOPT_CONFIG
from model.inputs.fetched import SMALL_FILES
from model.inputs.gguf import GgufFile
from model.inputs.json_file import check_size, read_object
from model.inputs.limits import MAX_TOKENIZER_BYTES
from model.inputs.paths import Place, place_argument, write_whole
from model.inputs.remote import RemotePath
from model.loading.gguf_config import hf_config
from model.loading.source import CONVERTED, UNFINISHED, Kind, ModelSource, resolve
from model.quantization.forms import FORM_NAMES
from scripts.flags.errors import add_debug_flag, failed

if TYPE_CHECKING:
    from model.config import LlamaConfig
    from model.loading.stored_weights import StoredWeights
    from model.quantization.forms import WeightForm

EXACT = "int4-exact"
CONFIG = "config.json"
# The index names files that are not copied; the configuration is written again.
_NOT_COPIED = ("model.safetensors.index.json", CONFIG, MODELOPT_CONFIG, UNFINISHED)
_CPU_DEVICES = 8  # Orbax cuts an array along the axis over which devices share it


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, a GGUF file or a hub name")
    parser.add_argument("folder", type=place_argument, help="where to write, also gs://bucket/folder: new, or empty")
    parser.add_argument("--revision", help="of a hub model")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="what to store (default: what keeps every value exactly)"
    )
    parser.add_argument(
        "--quantization",
        choices=(*FORM_NAMES, EXACT),
        help=f"8 or 4 bits a weight, for projections and head; {EXACT}: a checkpoint's own 4 and 6 bits, for CPUs",
    )
    add_debug_flag(parser)
    args = parser.parse_args(arguments)
    try:
        source = resolve(args.model, revision=args.revision)
        if source.weights is None:
            raise ValueError(f"{args.model} has no weights to convert")
        convert(source, source.weights, args.folder, dtype=args.dtype, quantization=args.quantization)
    except (Exception, KeyboardInterrupt) as error:
        return failed("convert_checkpoint", error, debug=args.debug)
    return 0


def convert(
    source: ModelSource,
    origin: Place,
    folder: Place,
    *,
    dtype: str | None,
    quantization: str | None = None,
) -> None:
    """Converts `source` into `folder`. `origin` is the place of its weights.

    The small files are read before the weights, and everything is checked before the first byte is written.
    `config.json` is written last: a folder without it is unfinished.

    Raises:
        ValueError: the model or its tokenizer cannot be read, or the folder cannot be used, see `_claimed`.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of the small arrays of small models
    from model.loading.orbax_format import check_place, save_orbax
    from model.loading.stored_weights import find_weights
    from model.quantization.forms import Activations, Rounding, described, form_named

    raw, files = _small_files(source)
    with _claimed(folder, list(files)):
        started = time.perf_counter()
        stored = find_weights(origin, source.config, "safetensors")
        kept, reason = choose_dtype(dtype, stored)
        form: WeightForm | None = stored.quantization
        if quantization == EXACT:
            form = stored.exact_form
            if form is None:
                raise ValueError(f"--quantization {EXACT}: {source.name} has no 4 or 6 bits that can be kept")
        elif quantization is not None:
            is_kept = stored.four_bit is not None and quantization == stored.four_bit.kind
            form = stored.four_bit if is_kept else form_named(quantization, stored.config.projection_inputs)
        activations = stored.activations
        if activations is Activations.STATIC and form != stored.quantization:
            activations = Activations.DYNAMIC  # the stored scales of inputs are for the stored type
        rounding = Rounding(is_static=True) if activations is Activations.STATIC else None
        kv_ranges = stored.kv_ranges()
        check_place(folder / CONVERTED)
        model = stored.load(dtype=kept, quantization=form, rounding=rounding)
        loaded = time.perf_counter()
        save_orbax(model, folder / CONVERTED, stored.config, kv_ranges, activations)
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, content)
        write_config(raw, folder, stored.config, kept)
    written = time.perf_counter()
    print(f"{folder}: read in {loaded - started:.1f} s, written in {written - loaded:.1f} s as {kept} ({reason})")
    if form is not None:
        how = "kept" if form in (stored.four_bit, stored.exact_form) else "requantised"
        print(described(form) + (f", {how} from {stored.packing}" if stored.packing else ""))
    if stored.remark:
        print(stored.remark)


@contextmanager
def _claimed(folder: Place, names: Sequence[str]) -> Iterator[None]:
    """Makes the folder, for a conversion that writes the weights, the files `names` and at last `CONFIG`.

    Until the end a folder of this machine holds the file `UNFINISHED`. After an error it is as it was.

    Raises:
        ValueError: the folder is not new or empty, or another process converts into it.
    """
    uncertain = f"{folder} holds an unfinished conversion, which may be running: delete it if not, or name another"
    is_new = not folder.exists()
    if not is_new and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if found := set() if is_new else {path.name for path in folder.iterdir()}:
        is_unfinished = UNFINISHED in found or (CONVERTED in found and CONFIG not in found)
        raise ValueError(uncertain if is_unfinished else f"{folder} is not an empty folder")
    if isinstance(folder, RemotePath):
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / UNFINISHED).touch(exist_ok=False)
    except FileExistsError as error:
        raise ValueError(uncertain) from error
    try:
        yield
    except BaseException:
        shutil.rmtree(folder / CONVERTED, ignore_errors=True)
        for name in (*names, CONFIG, UNFINISHED):
            (folder / name).unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):  # someone else has put a file there
                folder.rmdir()
        raise
    (folder / UNFINISHED).unlink()


def choose_dtype(asked: str | None, stored: StoredWeights) -> tuple[str, str]:
    """The dtype to store, and the reason for it in words."""
    held = " and ".join(stored.dtypes)
    if asked is not None:
        is_rounded = asked == "bfloat16" and stored.exact_dtype == "float32"
        return asked, f"as asked for; rounded from {held}" if is_rounded else "as asked for"
    if stored.dtypes == (stored.exact_dtype,):
        return stored.exact_dtype, "the checkpoint's own"
    return "float32", f"which holds {held} exactly, as bfloat16 does not; --dtype bfloat16 rounds and takes half"


def _small_files(source: ModelSource) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The content of `config.json`, and the other small files by name. ValueError or OSError if they cannot be read."""
    assert source.path is not None, "a preset has no weights"
    if source.kind is Kind.GGUF:
        return _gguf_small_files(source.path)
    found = [path for pattern in SMALL_FILES for path in sorted(source.path.glob(pattern))]
    paths = {str(path.relative_to(source.path)): path for path in found}
    for path in paths.values():
        check_size(path, MAX_TOKENIZER_BYTES)
    files = {name: path.read_bytes() for name, path in paths.items() if name not in _NOT_COPIED}
    return read_object(source.path / CONFIG), files


def _gguf_small_files(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The content of `config.json`, and the other small files by name, of a GGUF file. Raises ValueError if its
    metadata cannot be used."""
    from server.text.gguf_tokenizer import read_gguf_tokenizer

    tokenizer = read_gguf_tokenizer(path)
    template = tokenizer.chat_templates.for_transformers()
    settings = tokenizer.variables | ({"chat_template": template} if template else {})
    files = {
        "tokenizer.json": tokenizer.backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }
    return hf_config(GgufFile.read(path)), files


def write_config(raw: dict[str, Any], folder: Place, config: LlamaConfig, dtype: str) -> None:
    """Writes the checkpoint's `config.json` with the dtype that was stored, and whether the head is tied."""
    raw = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype", "quantization_config")}
    raw |= {"torch_dtype": dtype, "tie_word_embeddings": config.tie_word_embeddings}
    write_whole(folder / CONFIG, (json.dumps(raw, indent=2) + "\n").encode())


if __name__ == "__main__":
    os.environ["JAX_NUM_CPU_DEVICES"] = str(_CPU_DEVICES)
    sys.exit(main())
