"""The models of an engine, which have the shape of its own one: what they are, and where their weights are.

The weights of a model are on the device, in the host's memory, or on the disk only. The batcher decides what is on the
device (`batcher/scheduling/model_turns.py`). Copies in the host's memory are made when a model first comes to a chip.
On a CPU there are none by default: the prepared weights of an earlier load are mapped from their file.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx

from batcher.grammar import Grammars
from batcher.stats import ModelState
from model.compiling.compile_cache import expecting_compiles
from model.execution.host_copy import DEVICE, HOST, copied
from model.execution.step_programs import by_path
from model.inputs.paths import place
from model.inputs.words import one_line
from model.loading.hf_format import is_adapter
from model.loading.merged import MergedWeights
from model.loading.remote_tensors import readable
from model.loading.weights_digest import files_of, weights_digest
from pallas_kernels.chips import GIB
from scripts.building.device import host_bytes
from scripts.building.load import Loader, find_kv_scales
from scripts.building.weights import ChosenWeights, choose_weights, find_end_tokens
from server.engine.adapters import AdapterError
from server.engine.wire import LoadedModel
from server.grammar.matcher import TokenGrammars, vocabulary_of
from server.text.tokenizer import ByteLevelTokenizer

if TYPE_CHECKING:
    from model.network.llama import Llama
    from scripts.building.limits import EnginePlan

logger = logging.getLogger(__name__)


Weights = tuple[dict[str, jax.Array], np.ndarray | None]  # a model's arrays by their paths, and its K/V scales


class RunnersModels:
    """The models of one engine, by their identities. Any thread may call it; `weights` takes long.

    Args:
        plan: the plan of the engine, whose own model all others resemble.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan
        self._lock = Lock()
        self._loader: Loader | None = None
        self._chosen: dict[int, ChosenWeights] = {}  # by identity
        self._files: dict[int, int] = {}  # `identity_of` when a model was added, by identity
        self._kept: OrderedDict[int, Weights] = OrderedDict()  # in the host's memory; the most recently used last
        settings = plan.settings
        is_mapped = settings.models_host_memory is None and plan.device.platform == "cpu"
        self._most_bytes = 0 if is_mapped else host_bytes(settings)

    def read_with(self, loader: Loader) -> None:
        """Reads weights with this loader from now on. It reports nothing: it reads while requests are served."""
        self._loader = replace(loader, report=lambda line: None)

    def describe_copy(self, model: Llama) -> str | None:
        """How long a model in the host's memory takes to come to the device, at the speed of a copy of the largest of
        these arrays, which this method makes. None: the host's memory has no room for such a model."""
        arrays = jax.tree.leaves(nnx.state(model))
        size = sum(array.nbytes for array in arrays)
        if size > self._most_bytes:
            return None
        copy = jax.block_until_ready(copied(max(arrays, key=lambda array: array.nbytes), HOST))
        began = time.perf_counter()
        jax.block_until_ready(copied(copy, DEVICE))
        speed = copy.nbytes / (time.perf_counter() - began)
        return f"{size / speed:.2f} s: {size / GIB:.2f} GiB at {speed / GIB:.3g} GiB/s, which a copy has reached"

    def load(self, path: str) -> int:
        """Adds the model at `path`, on a host that follows: the leader has seen that it has the engine's shape. The
        errors are those of `choose_model`."""
        return self.add(choose_model(self._plan, path))

    def add(self, weights: ChosenWeights) -> int:
        """Adds a model of the engine's shape, whose weights are read when it first runs. Returns its identity, which is
        the same on all hosts of the engine."""
        identity = files = identity_of(weights)
        if jax.process_count() > 1 and weights.stored is not None:
            identity = _number(weights_digest(weights.stored))
        with self._lock:
            if identity not in self._chosen:  # else the first path with this content stays
                self._chosen[identity], self._files[identity] = weights, files
        return identity

    def forget(self, identity: int) -> bool:
        """Removes a model. Returns whether there are others."""
        with self._lock:
            for found in (self._chosen, self._files, self._kept):
                found.pop(identity, None)
            return bool(self._chosen)

    def loaded(self, name: str, identity: int, path: str) -> LoadedModel:
        """The model under this name, for the HTTP processes."""
        weights, limits = self._chosen[identity], self._plan.chips.limits
        size, ends = weights.config.vocab_size, weights.eos_token_ids
        embeds = None if limits.pooling is None else weights.config.hidden_size
        folder, most = folder_of(weights) or "", limits.max_loras
        return LoadedModel(name, identity, path, limits.max_model_len, size, ends, embeds, folder, most)

    def ends(self, identity: int) -> tuple[tuple[int, ...], Grammars | None]:
        """The model's end-of-sequence ids and its grammars."""
        weights = self._chosen[identity]
        folder, ends = folder_of(weights), weights.eos_token_ids
        tokenizer = self._plan.tokenizer or self._plan.weights.source.tokenizer if folder is None else Path(folder)
        if tokenizer is None or not ends:
            return ends, None
        size = weights.config.vocab_size
        read = partial(ByteLevelTokenizer.from_folder, tokenizer, vocab_size=size)
        return ends, TokenGrammars(lambda: vocabulary_of(read(), vocab_size=size, end_ids=ends))

    def states(self) -> Mapping[int, ModelState]:
        """Where the weights of each model are that is not on the device."""
        with self._lock:
            return {model: ModelState.HOST if model in self._kept else ModelState.DISK for model in self._chosen}

    def weights(self, identity: int) -> Weights:
        """The model's weights on the devices.

        Raises ValueError or OSError if its files have changed or cannot be read.
        """
        with self._lock:
            weights, kept = self._chosen.get(identity), self._kept.get(identity)
            if kept is not None:
                self._kept.move_to_end(identity)
        if kept is not None:
            return {path: copied(array, DEVICE, shares=True) for path, array in kept[0].items()}, kept[1]
        if weights is None:
            raise ValueError("the model has been unloaded")
        return self._read(identity, weights)

    def _read(self, identity: int, weights: ChosenWeights) -> Weights:
        loader = self._loader
        assert loader is not None, "models are brought after the start"
        if identity_of(weights) != self._files.get(identity):
            raise ValueError(f"{weights.source.weights} has changed since it was loaded: load it again")
        loaded, spec = loader.read(weights, keeps=True, drafts=False), loader.attention.spec
        kv_scales = None
        if spec.has_kv_scales:
            with expecting_compiles():
                kv_scales, _ = find_kv_scales(loaded.model, loaded.kv_ranges, spec)
        arrays = by_path(nnx.state(loaded.model))
        self._keep(identity, arrays, kv_scales)
        return arrays, kv_scales

    def _keep(self, identity: int, arrays: dict[str, jax.Array], kv_scales: np.ndarray | None) -> None:
        """Keeps a copy in the host's memory if there is room, in place of the least recently used ones. Without one the
        model is read again."""
        size = sum(array.nbytes for array in arrays.values())  # of each model
        if size > self._most_bytes:
            return
        with self._lock:
            while (len(self._kept) + 1) * size > self._most_bytes:
                self._kept.popitem(last=False)
        try:
            copies = {path: copied(array, HOST, shares=True) for path, array in arrays.items()}
            jax.block_until_ready(copies)
        except jax.errors.JaxRuntimeError as error:
            words = one_line(str(error))
            logger.warning("the host's memory has no room for a model, in spite of --models-host-memory: %s", words)
            return
        with self._lock:
            if identity in self._chosen:
                self._kept[identity] = copies, kv_scales


def choose_model(plan: EnginePlan, path: str) -> ChosenWeights:
    """The weights of the model at `path`: a checkpoint, or an adapter of the plan's own model.

    Raises ValueError or OSError if they cannot be used, and AdapterError with status 404 if there are none.
    """
    where, own = place(path, "model"), plan.weights
    if not (where.is_dir() and is_adapter(where)):
        if isinstance(where, Path) and where.is_absolute() and not where.exists():
            raise AdapterError(f"model: there is no folder or file {path}", 404)
        return choose_weights(replace(plan.settings, model=path), plan.device.platform)
    if own.stored is None:
        raise ValueError(f"{path} is a LoRA adapter, and the weights of --model are random")
    stored = MergedWeights.of(own.stored.base if isinstance(own.stored, MergedWeights) else own.stored, where)
    source = (own.source.base or own.source).with_adapter(path, where, stored.config)
    ends = find_end_tokens(source) if source.own_tokenizer else own.end_tokens
    return replace(own, source=source, stored=stored, config=stored.config, end_tokens=ends)


def folder_of(weights: ChosenWeights) -> str | None:
    """Where a model's tokenizer is; None: it has that of the engine's own model."""
    source = weights.source
    found = source.path if source.base is None else source.own_tokenizer
    return None if found is None else str(found)


def identity_of(weights: ChosenWeights) -> int:
    """A number above 0 and below 2**63 for the weights in these files. It changes when a file does."""
    facts = [repr((weights.stored, weights.source.name if weights.stored is None else None))]
    if weights.stored is not None:
        facts += sorted(f"{file} {readable(file).version()}" for file in files_of(weights.stored))
    return _number(hashlib.sha256("\n".join(facts).encode()).hexdigest())


def _number(digest: str) -> int:
    return int(digest[:16], 16) >> 1 | 1
