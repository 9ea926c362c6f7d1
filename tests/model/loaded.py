"""Checkpoints of any form as the arrays of the model that they are loaded as."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.config import LlamaConfig
from model.inputs.paths import Place
from model.loading import weights
from model.loading.orbax_format import OrbaxFiles
from model.loading.source import resolve
from model.loading.weights import load_hf
from model.network.llama import Llama
from model.network.sharding import make_mesh
from model.quantization.forms import WeightForm
from tests.model import checkpoints


def flat(model: Llama) -> dict[str, np.ndarray]:
    """Path -> array."""
    items = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(variable.get_value()) for path, variable in items}


def load(path: Path, form: WeightForm | None = None, num_shards: int = 1, **options: Any) -> dict[str, np.ndarray]:
    """In float32, of a folder or a GGUF file."""
    source, mesh = resolve(str(path)), make_mesh(num_shards) if num_shards > 1 else None
    return flat(load_hf(source.path, source.config, dtype=jnp.float32, mesh=mesh, quantization=form, **options))


def load_orbax(folder: Place | str, config: LlamaConfig, **options: Any) -> Llama:
    """Of converted weights, in their form."""
    files = OrbaxFiles(folder, config)
    return weights.load(files, quantization=files.contents().quantization, **options)


def load_wide(folder: Path, values: Mapping[str, np.ndarray], *options: Any) -> dict[str, np.ndarray]:
    """The same values from a checkpoint that is not quantised, by default of the variant gqa2."""
    if not (folder / "config.json").exists():
        checkpoints.write(folder, "gqa2")
    checkpoints.write_tensors(folder, dict(values))
    return load(folder, *options)


def assert_equal(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)
