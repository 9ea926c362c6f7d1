"""Reads LoRA adapters: the folders that PEFT writes, and llama.cpp's GGUF files. What would be computed wrongly is
refused, and one message lists all problems.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from model.config import LlamaConfig
from model.inputs.gguf import is_gguf, parts_of
from model.inputs.json_file import read_object
from model.inputs.paths import Place
from model.inputs.schema import check
from model.inputs.words import one_line, shown
from model.loading.adapter_files import PREFIX, named, resized_for, slices_of
from model.loading.adapter_targets import NO_PROJECTIONS, AdapterConfig, layer_of, targets_of
from model.loading.copies import local_file
from model.loading.hf_format import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    EMBEDDING,
    HEAD,
    MERGING,
    expected_shapes,
)
from model.loading.remote_tensors import RemoteSlice, readable
from model.loading.tensor_files import DTYPES, by_message, grouped
from model.network.lora import LoraWeights

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)  # a greater float32 becomes infinite on a chip

# Settings with which the tensors mean something else. Each must be absent, null, false or empty.
_REFUSED = (
    "use_dora", "lora_bias", "fan_in_fan_out", "trainable_token_indices", "target_parameters",
    "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config",
    "monteclora_config",
)  # fmt: skip
# Initialisations that take the adapter's first values out of the base's weights.
_CHANGES_BASE = re.compile(r"pissa.*|olora|corda|lora_ga|loftq", re.IGNORECASE)
# Tensors that are no A or B, and what they are.
_OTHERS = (
    (re.compile(r".*lora_magnitude_vector.*"), "DoRA"),
    (re.compile(r".*lora_embedding_[AB].*"), "adapter of the embedding"),
    (re.compile(r"lm_head\.lora_[AB].*"), "adapter of the head"),
    (re.compile(r".*(token_adapter|trainable_tokens).*"), "trainable tokens"),
    (re.compile(r".*\.bias"), "bias"),
    (re.compile(r".*\.base_layer\.weight"), "weights of the base"),
    (re.compile(r".*modules_to_save.*|.*(embed_tokens|lm_head|norm)\.weight"), "modules_to_save"),
)
# Problems of adapters that are merged here as they are read, and of those that work once peft has merged them.
_MERGED_HERE = re.compile(r"adapters of .* are not|modules_to_save=|\((adapter of|modules_to_save|weights of)")
_MERGEABLE = re.compile(r"is not supported|\((DoRA|trainable tokens|bias)")
_MOST_MERGED_RANK = 512


@dataclass(frozen=True, kw_only=True)
class MergeableAdapter:
    """All that an adapter changes in a checkpoint.

    Args:
        identity: as that of `LoraWeights`. It depends on the version of the files if some tensors are not read yet.
        config: of the checkpoint with the changes.
        pairs: (A, B) as in `LoraWeights`, by the module to whose weight their product is added.
        tensors: those that take the place of the checkpoint's, by name.
        versions: those of the files.
    """

    identity: int
    config: LlamaConfig
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]
    tensors: Mapping[str, RemoteSlice]
    versions: Mapping[Place, str]


@dataclass(kw_only=True)
class _Stored:
    """The tensors of an adapter, not read yet."""

    tensors: Mapping[str, Any]  # "model.layers.0.self_attn.q_proj.lora_A" -> its slice
    whole: Mapping[str, Any] = field(default_factory=dict)  # "lm_head.weight" -> its slice
    scale: Callable[[str, int], float]  # of a module and its rank
    ranks: Mapping[str, int] = field(default_factory=dict)  # of the modules that the config targets
    problems: list[str]


def read_adapter(place: Place, config: LlamaConfig, *, max_rank: int) -> LoraWeights:
    """The adapter of a folder, or of a GGUF file, for a model of this config.

    Raises:
        ValueError: it is damaged, not an adapter of this model, or of a kind that is not supported; one line names all
            problems.
        OSError: a file cannot be read.
    """
    found = _read(place, config, max_rank=max_rank, merges=False)
    layers: list[dict[str, tuple[np.ndarray, np.ndarray]]] = [{} for _ in range(config.num_layers)]
    for module, pair in found.pairs.items():
        layers[layer_of(module)][module.rpartition(".")[2]] = pair
    return LoraWeights(identity=found.identity, layers=layers)


def read_to_merge(folder: Place, config: LlamaConfig) -> MergeableAdapter:
    """The adapter of a folder, to be merged into a checkpoint of this config. It may also change the embedding and the
    head, and have whole tensors (`modules_to_save`), also for another vocabulary. Raises as `read_adapter`."""
    resized = resized_for(folder, config)
    found = _read(folder, resized, max_rank=_MOST_MERGED_RANK, merges=True)
    ends = [key for key in (EMBEDDING.key, HEAD.key) if key in found.tensors]
    if resized.vocab_size != config.vocab_size and len(ends) < 2:
        tokens = f"a head and an embedding of {resized.vocab_size} tokens"
        raise ValueError(f"{folder} is not a LoRA adapter that this model can serve: it lacks {tokens}")
    is_tied = config.tie_word_embeddings and not ends and found.pairs.keys().isdisjoint(NO_PROJECTIONS)
    return replace(found, config=replace(resized, tie_word_embeddings=is_tied))


def _read(place: Place, config: LlamaConfig, *, max_rank: int, merges: bool) -> MergeableAdapter:
    """The adapter. Without `merges` it changes projections only."""
    versions = _versions(place)
    stored = _stored_gguf(local_file(place), config) if is_gguf(place) else _stored_peft(place, config, merges=merges)
    modules = {key.rpartition(".")[0] for key in stored.tensors} | stored.ranks.keys()
    problems = stored.problems + _pair_problems(stored, modules, config, max_rank)
    if not modules and not problems:
        problems = ["it changes no projection of the model"]
    pairs = {} if problems else {module: _pair(stored, module) for module in sorted(modules)}
    if _versions(place) != versions:
        raise ValueError(f"{place} changed while it was read: load it again")
    infinite = [name for name, pair in pairs.items() if not all((np.abs(x) <= _LARGEST).all() for x in pair)]
    problems += [f"not finite, or too large for bfloat16: {grouped(infinite)}"] if infinite else []
    if problems:
        raise ValueError(one_line(f"{place} is not a LoRA adapter that this model can serve: {'; '.join(problems)}"))
    identity = _identity(pairs, sorted(versions.values()) if stored.whole else [])
    return MergeableAdapter(identity=identity, config=config, pairs=pairs, tensors=stored.whole, versions=versions)


def _versions(place: Place) -> dict[Place, str]:
    """For each file, a text that changes when the file does."""
    files = parts_of(place) if is_gguf(place) else [place / name for name in ADAPTER_FILES]
    return {file: readable(file).version() for file in files if file.exists()}


def _pair(stored: _Stored, module: str) -> tuple[np.ndarray, np.ndarray]:
    """A and the scaled B, in float32."""
    a, b = (np.ascontiguousarray(stored.tensors[f"{module}.lora_{x}"][...], np.float32) for x in "AB")
    with np.errstate(over="ignore", invalid="ignore"):  # found by their values
        return a, b * np.float32(stored.scale(module, len(a)))


def _identity(pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], versions: Sequence[str]) -> int:
    digest = hashlib.blake2b("\n".join(versions).encode(), digest_size=8)
    for module, (a, b) in pairs.items():
        digest.update(f"{module} {len(a)}\n".encode())
        digest.update(a.data)
        digest.update(b.data)
    return int.from_bytes(digest.digest()) >> 1 or 1


def _pair_problems(stored: _Stored, modules: Iterable[str], config: LlamaConfig, max_rank: int) -> list[str]:
    """What is wrong with the shapes of A and B."""
    shapes, tensors = _shapes(config), stored.tensors
    pairs = {module: [f"{module}.lora_{x}" for x in "AB"] for module in sorted(modules)}
    missing = [name for pair in pairs.values() for name in pair if name not in tensors]
    problems = [f"missing: {grouped(missing)}"] if missing else []
    found: list[tuple[str, str]] = []
    for module, pair in pairs.items():
        outputs, inputs = shapes[f"{module}.weight"]
        ranks = []
        for name, axis, size in zip(pair, (1, 0), (inputs, outputs), strict=True):
            if name not in tensors:
                continue
            shape = tuple(tensors[name].get_shape())
            if len(shape) == 2 and shape[axis] == size:
                ranks.append(shape[1 - axis])
            else:
                wanted = f"({size}, rank)" if axis == 0 else f"(rank, {size})"
                found.append((f"has shape {shown(shape)}, not {wanted}", name))
        if len(set(ranks)) > 1:
            found.append((f"has ranks {ranks[0]} and {ranks[1]} in A and B", module))
        elif ranks and ranks[0] > max_rank:
            found.append((f"has rank {ranks[0]}, which is above --max-lora-rank {max_rank}", module))
        elif ranks and ranks[0] != (stated := stored.ranks.get(module, max(ranks[0], 1))):
            found.append((f"has rank {ranks[0]} and should have {stated}", module))
    found += [
        (f"has shape {shown(shape)}, not {shapes[name]}", name)
        for name, value in stored.whole.items()
        if (shape := tuple(value.get_shape())) != shapes[name]
    ]
    return problems + by_message(found)


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors that an adapter may change."""
    return expected_shapes(replace(config, tie_word_embeddings=False))


def _stored_peft(folder: Place, config: LlamaConfig, *, merges: bool) -> _Stored:
    if not (folder / ADAPTER_CONFIG).exists():
        raise ValueError(f"{folder} has no {ADAPTER_CONFIG}: it is not a folder of a LoRA adapter")
    raw = read_object(folder / ADAPTER_CONFIG)
    if (kind := raw.get("peft_type")) not in (None, "LORA"):
        raise ValueError(f"{folder} is an adapter of {shown(kind)}; only peft_type='LORA' is supported")
    file, problems = check(raw, AdapterConfig)
    problems += _setting_problems(raw, config, merges=merges)
    found, tensor_problems = _by_name(slices_of(folder), config, merges=merges)
    problems += tensor_problems
    whole = {name: value for name, value in found.items() if name.endswith(".weight")}
    tensors = {name: value for name, value in found.items() if name not in whole}
    if file is None:
        return _Stored(tensors=tensors, scale=lambda *_: 1.0, problems=problems)
    ranks, alphas, target_problems = targets_of(file, config, merges=merges)
    extra = [] if target_problems else [key for key in tensors if key.rpartition(".")[0] not in ranks]
    problems += target_problems + ([f"not among target_modules: {grouped(extra)}"] if extra else [])
    for name in file.modules_to_save or () if merges else ():
        saved = {key for key in _shapes(config) if f".{key}".endswith(f".{name}.weight")}
        if not saved or saved - whole.keys():
            problems.append(f"missing: the weights of {shown(name)}, which modules_to_save names")
    here = [problem for problem in problems if _MERGED_HERE.search(problem)]
    if any(_MERGEABLE.search(problem) for problem in problems if problem not in here):
        problems.append(MERGING)
    elif here:
        is_alike = resized_for(folder, config).vocab_size == config.vocab_size and not config.tie_word_embeddings
        problems.append(f"{f'--models NAME={folder}' if is_alike else f'--model {folder}'} merges it into its model")

    def scale(module: str, rank: int) -> float:
        return alphas[module] / (math.sqrt(rank) if file.use_rslora else rank)

    return _Stored(tensors=tensors, whole=whole, scale=scale, ranks=ranks, problems=problems)


def _setting_problems(raw: Mapping[str, Any], config: LlamaConfig, *, merges: bool) -> list[str]:
    others = ("ensure_weight_tying",) if config.tie_word_embeddings else ()
    refused = (*_REFUSED, *others) if merges else (*_REFUSED, "modules_to_save")
    problems = [f"{name}={shown(raw[name])} is not supported" for name in refused if raw.get(name)]
    if (bias := raw.get("bias")) not in (None, "none"):
        problems.append(f"bias={shown(bias)} is not supported (only 'none')")
    if _CHANGES_BASE.fullmatch(start := str(raw.get("init_lora_weights"))):
        how = "convert it with peft's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        problems.append(f"init_lora_weights={shown(start)} has changed the base's weights: {how}")
    return problems


def _by_name(slices: Mapping[str, Any], config: LlamaConfig, *, merges: bool) -> tuple[dict[str, Any], list[str]]:
    """The tensors that can be used by their names in the model, and what is wrong with others."""
    modules = (*config.projections, *(NO_PROJECTIONS if merges else ()))
    known = {f"{module}.lora_{x}" for module in modules for x in "AB"} | (_shapes(config).keys() if merges else set())
    tensors: dict[str, Any] = {}
    found: list[tuple[str, str]] = []
    for stored, value in slices.items():
        name, tensor = named(stored, value)
        if name not in known:
            name = stored.removeprefix(PREFIX)
            found.append((_what_else(name, value.get_shape(), config), name))
            continue
        if name in tensors:
            found.append(("occurs twice", name))
        if value.get_dtype() not in DTYPES:
            found.append((f"has type {value.get_dtype()}, not one of {', '.join(DTYPES)}", name))
        tensors[name] = tensor
    return tensors, by_message(found)


def _what_else(name: str, shape: Sequence[int], config: LlamaConfig) -> str:
    """What a tensor is that is no A or B of a projection."""
    if words := next((words for pattern, words in _OTHERS if pattern.fullmatch(name)), None):
        is_other = words == "modules_to_save" and len(shape) == 2 and shape[0] != config.vocab_size
        tokens = f", of {shape[0]} tokens, and the model has {config.vocab_size}" if is_other else ""
        return f"({words}{tokens}) cannot be served"
    layer = _LAYER.match(name)
    if layer and len(layer[1]) < 10 and int(layer[1]) >= config.num_layers:
        return f"(a layer beyond the model's {config.num_layers}) cannot be served"
    return "(no A or B of a projection of attention or MLP) cannot be served"


def _stored_gguf(path: Path, config: LlamaConfig) -> _Stored:
    from model.loading.gguf_adapter import open_gguf_adapter  # see `gguf_tensors`

    tensors, alpha, problems = open_gguf_adapter(path, config)
    # As in llama.cpp: one alpha for all projections, and 0 stands for none, with which B is not scaled.
    return _Stored(tensors=tensors, scale=lambda _, rank: alpha / rank if alpha else 1.0, problems=problems)
