"""Finds and checks a checkpoint's weights before memory is planned and before any of them is placed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from model.config import LlamaConfig
from model.inputs.gguf import is_gguf
from model.inputs.paths import Place
from model.loading.checkpoint import open_checkpoint
from model.loading.hf_format import HEAD
from model.loading.kv_ranges import read_kv_ranges
from model.loading.source import CONVERTED
from model.loading.tensor_files import TensorFiles
from model.loading.weights import load_hf
from model.network.llama import Llama
from model.quantization.forms import Activations, FourBit, MixedForms, Rounding, SixBit, WeightForm


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Weights on a disk or in a bucket that are checked against the model's configuration but not loaded yet."""

    path: Place  # a folder, or a GGUF file
    is_converted: bool  # in the form of `model.loading.orbax_format`; otherwise safetensors or GGUF
    config: LlamaConfig  # matches the weights: not tied if they have their own head
    dtypes: tuple[str, ...]  # the stored types, each once
    remark: str | None  # how the weights differ from `config.json`
    quantization: WeightForm | None = None  # the form of the projections; if converted, also that of the head
    activations: Activations | None = None  # how a quantised checkpoint wants inputs to be rounded
    packing: str | None = None  # the stored form, such as "GPTQ int4", if loading requantises it to `quantization`
    four_bit: FourBit | None = None  # the form by which chips hold packed projections without requantising them
    exact_form: FourBit | SixBit | MixedForms | None = None  # the 4- and 6-bit form with all numbers as they are stored
    four_bit_fault: str | None = None  # why `four_bit` is None for packed projections

    @property
    def exact_dtype(self) -> str:
        """The narrower of bfloat16 and float32 that holds every stored value exactly."""
        return "bfloat16" if self.dtypes == ("bfloat16",) else "float32"

    def kv_ranges(self) -> np.ndarray | None:
        """The ranges of keys and values, f32[L, 2, K], from the K/V scales of the checkpoint. None if it has no such
        scales, or if all are 1. A converted checkpoint has the ranges of its source."""
        if self.is_converted:
            from model.loading.orbax_format import Description

            return Description.read(self.path, self.config).ranges(self.config)
        if is_gguf(self.path):
            return None  # the format has no K/V scales
        with TensorFiles(self.path, self.config) as files:
            return read_kv_ranges(files, self.config)

    def load(
        self,
        *,
        dtype: Any,
        mesh: Mesh | None = None,
        quantization: WeightForm | None = None,
        rounding: Rounding | None = None,
    ) -> Llama:
        """Loads the model onto `mesh`, cast to `dtype`. `quantization` is the form of its projections and head.
        `rounding` says how their inputs are rounded.

        Raises:
            ValueError: the weights are damaged, or stored in another form than `quantization` asks for.
        """
        form = {"dtype": dtype, "mesh": mesh, "rounding": rounding}
        if self.is_converted:
            from model.loading.orbax_format import load_orbax

            self._check_form(quantization)
            return load_orbax(self.path, self.config, **form)
        return load_hf(self.path, self.config, quantization=quantization, **form)

    def _check_form(self, asked: WeightForm | None) -> None:
        if asked != self.quantization:
            held = self.quantization or "weights that are not quantised"
            raise ValueError(
                f"{self.path} holds {held}, and {asked or 'none'} is asked for: convert again with --quantization, "
                f"or load the safetensors"
            )


def has_weights(path: Place) -> bool:
    """Whether there are weights of any form at `path`, or only the files that describe a model."""
    return is_gguf(path) or (path / CONVERTED).is_dir() or any(path.glob("*.safetensors"))


def find_weights(path: Place, config: LlamaConfig, load_format: str = "auto") -> StoredWeights:
    """The weights of the checkpoint at `path`, a folder or a GGUF file.

    Args:
        config: from its `config.json`, or from the file's metadata.
        load_format: "orbax", "safetensors" for the form that is not converted, or "auto" for the converted form if
            there is one.

    Raises:
        ValueError: there are no weights, files are incomplete, or they are those of another model.
    """
    if is_gguf(path) and load_format == "orbax":
        raise ValueError(f"{path} is a GGUF file: only a folder can hold converted weights")
    if load_format == "orbax" or (load_format == "auto" and (path / CONVERTED).is_dir()):
        return _converted(path / CONVERTED, config)
    with open_checkpoint(path, config) as files:
        found, dtypes, form, packing = files.with_own_head(), files.dtypes, files.form, files.packing
        activations, (four_bit, fault) = files.activations, files.in_four_bits()
        exact = files.in_exact_form()
    remark = None
    if found.tie_word_embeddings != config.tie_word_embeddings:
        remark = f"{HEAD.key} differs from the embedding and is used, although config.json ties them"
    # The dtype of config.json comes before that of the tensors, as in Hugging Face's implementation.
    stated = config.checkpoint_dtype or (dtypes[0] if len(dtypes) == 1 else None)
    found = replace(found, checkpoint_dtype=stated)
    return StoredWeights(
        path=path,
        is_converted=False,
        config=found,
        dtypes=dtypes,
        remark=remark,
        quantization=form,
        activations=activations,
        packing=packing,
        four_bit=four_bit,
        exact_form=exact,
        four_bit_fault=fault,
    )


def _converted(folder: Place, config: LlamaConfig) -> StoredWeights:
    from model.loading.orbax_format import Description

    description = Description.read(folder, config)
    dtype = description.dtype
    return StoredWeights(
        path=folder,
        is_converted=True,
        config=replace(config, checkpoint_dtype=dtype),
        dtypes=(dtype,),
        remark=None,
        quantization=description.form(config),
        activations=description.activations,
    )
