"""The model in its stored form, through Orbax: fused, cast and cut for a number of chips once, then restored as it is.

A start from here skips joining and casting, and every chip reads its own part.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from model.config import LlamaConfig
from model.llama import Llama
from model.sharding import abstract_model, num_shards_of

FORMAT = 2
DESCRIPTION_FILE = "stored.json"
_ARRAYS = "arrays"


def save_orbax(model: Llama, folder: Path | str, config: LlamaConfig) -> None:
    """Writes the stored form to `folder`, which must be new or empty.

    Args:
        config: the checkpoint's own, before KV heads were repeated.
    """
    folder = Path(folder).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    with _checkpointer() as checkpointer:
        checkpointer.save(folder / _ARRAYS, _named(model))
    description = {"format": FORMAT, "num_shards": model.num_shards, "dtype": model.dtype.name}
    # Written last: a folder without it was interrupted.
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description | {"config": _identity(config)}, indent=2) + "\n")


def load_orbax(
    folder: Path | str,
    config: LlamaConfig,
    *,
    dtype: Any,
    mesh: Mesh | None = None,
    for_cpu: bool = False,
) -> Llama:
    """The model that `save_orbax` wrote, cast to `dtype`, restored straight to where `mesh` wants it.

    Raises:
        ValueError: the folder is unfinished, or holds another model, format, or the form of another number of chips.
    """
    folder = Path(folder).absolute()
    _check(folder, config, num_shards_of(mesh))
    model = abstract_model(config, dtype=dtype, mesh=mesh, for_cpu=for_cpu)
    wanted = _named(model)
    with _checkpointer() as checkpointer:
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        arrays = checkpointer.restore(
            folder / _ARRAYS, args=ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args)
        )
    graphdef, state = nnx.split(model)
    filled = [(path, variable.replace(arrays[_name(path)])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _checkpointer() -> ocp.Checkpointer:
    # Weights do not compress; trying costs most of the time of a restore.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _check(folder: Path, config: LlamaConfig, num_shards: int) -> None:
    path = folder / DESCRIPTION_FILE
    if not path.exists():
        raise ValueError(f"{folder} holds no finished conversion ({DESCRIPTION_FILE} is missing): convert again")
    description = json.loads(path.read_text())
    if description["format"] != FORMAT:
        raise ValueError(f"{path} has format {description['format']}, this version reads {FORMAT}: convert again")
    if description["num_shards"] != num_shards:
        raise ValueError(
            f"{folder} was converted for {description['num_shards']} chip(s), and {num_shards} are asked for: "
            f"convert again, or load the safetensors"
        )
    expected = _identity(config)
    differing = [key for key, value in description["config"].items() if expected.get(key) != value]
    if differing:
        raise ValueError(f"{folder} holds another model than the config beside it: {', '.join(differing)} differ")


def _identity(config: LlamaConfig) -> dict[str, Any]:
    """What makes it this model. How generation ends, and what the weights once were saved in, do not."""
    return replace(config, checkpoint_dtype=None, bos_token_id=None, eos_token_ids=()).to_hf()


def _named(model: Llama) -> dict[str, Any]:
    return {_name(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
