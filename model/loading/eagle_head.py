"""Loads an EAGLE head from the folder of its public checkpoint: safetensors files, or `pytorch_model.bin`.

The names of tensors differ: EAGLE calls the layer `layers.0`, EAGLE-3 calls it `midlayer`, and some trainers write
`model.` before all names. A smaller draft vocabulary has two tables. `d2t` is what to add to a draft token to get the
model's token. `t2d` says whether a token of the model can be drafted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from model.eagle_config import NUM_TAPS, EagleConfig, EagleForm
from model.families import LLAMA
from model.loading.hf_format import INDEX_FILE, SINGLE_FILE, Source, layer_shapes
from model.loading.remote_tensors import File, RemoteSlice, RemoteTensors, readable
from model.loading.tensor_files import DTYPES, faults_of, files_in
from model.loading.tensors import Checkpoint, Reader
from model.loading.torch_file import read_torch_file
from model.loading.weights import fill_each, join, random_values, read_source, seeds_of
from model.network.eagle import EagleHead
from model.network.sharding import abstract_head, num_shards_of
from model.quantization.stored_form import Part

TORCH_FILE = "pytorch_model.bin"
EMBEDDING = "embed_tokens.weight"
_TO_MODEL, _TO_DRAFT = "d2t", "t2d"
_PREFIXES = re.compile(r"(model\.)?(midlayer\.|layers\.0\.)?")
_IGNORED = re.compile(r"layer\.self_attn\.rotary_emb\.inv_freq")  # computed from the config
_ROWS_COMPARED = 4096  # rows of two embeddings that are compared together; bounds the host's memory

# Parameter -> the tensors that fill it, joined along the rows.
_SOURCES: dict[str, tuple[Source, ...]] = {
    "embedding": (Source(EMBEDDING),),
    "fc.kernel": (Source("fc.weight"),),
    "layer.embedding_norm.scale": (Source("layer.input_layernorm.weight"),),
    "layer.feature_norm.scale": (Source("layer.hidden_norm.weight"),),
    **{
        f"layer.{name}": tuple(Source(f"layer.{tensor.name}.weight", tensor.is_kv) for tensor in tensors)
        for name, tensors in LLAMA.parameters.items()
        if name != "attention_norm.scale"
    },
    "norm.scale": (Source("norm.weight"),),
    "head.kernel": (Source("lm_head.weight"),),
}


class HeadFiles(Checkpoint):
    """The tensors of a head, under the names of `_SOURCES`.

    Raises:
        ValueError: there are no files, a file cannot be read, or the tensors are not those of `config`. The message
            names each tensor that is missing, repeated, unexpected, mis-shaped or of an unreadable type.
    """

    def __init__(self, folder: Path, config: EagleConfig):
        self._folder = folder
        self._config = config
        self._slices: dict[str, RemoteSlice] = {}
        self._names: dict[str, str] = {}  # name in `_SOURCES` -> stored name
        self.versions: dict[File, str] = {}
        self._check([problem for name, value in self._stored() for problem in self._add(name, value)])

    @property
    def has_embedding(self) -> bool:
        return EMBEDDING in self._slices

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slices[key].get_shape())

    def reader(self, key: str, rows: slice) -> Reader:
        return self._slices[key].reader(rows)

    def tokens(self) -> np.ndarray:
        """The model's token of each draft token, i32[draft_vocab_size]. ValueError if the tables are inconsistent."""
        count, vocab = self._config.draft_vocab_size, self._config.layer.vocab_size
        tokens = np.arange(count, dtype=np.int64)
        if _TO_MODEL in self._slices:
            tokens = tokens + self._slices[_TO_MODEL][...].astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= vocab or len(np.unique(tokens)) != count:
            raise ValueError(
                f"{self._folder}: d2t does not give each of {count} drafts a token of its own below {vocab}"
            )
        if _TO_DRAFT in self._slices:
            can_draft = self._slices[_TO_DRAFT][...] != 0
            if can_draft.sum() != count or not can_draft[tokens].all():
                raise ValueError(f"{self._folder}: t2d and d2t name different tokens")
        return tokens.astype(np.int32)

    def shares_embedding(self, model: Checkpoint, key: str) -> bool:
        """Whether the head's embedding equals the model's tensor `key`, up to the rounding of 16-bit types."""
        if self.shape(EMBEDDING) != model.shape(key):
            return False
        for start in range(0, self.shape(EMBEDDING)[0], _ROWS_COMPARED):
            rows = (slice(start, min(start + _ROWS_COMPARED, self.shape(EMBEDDING)[0])),)
            read = (files.reader(name, rows[0]) for files, name in ((self, EMBEDDING), (model, key)))
            own, other = (reader(rows).astype(np.float32) for reader in read)
            if not np.allclose(own, other, rtol=2**-7, atol=1e-6):
                return False
        return True

    def _stored(self) -> Iterator[tuple[str, RemoteSlice]]:
        has_safetensors = any((self._folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
        is_torch = not has_safetensors and (self._folder / TORCH_FILE).exists()
        for name in [TORCH_FILE] if is_torch else files_in(self._folder):
            path = self._folder / name
            file = readable(path)
            self.versions[file] = file.version()
            yield from (read_torch_file(path) if is_torch else RemoteTensors(path).slices()).items()

    def _add(self, stored: str, value: RemoteSlice) -> list[str]:
        match = _PREFIXES.match(stored)
        assert match is not None, "the pattern matches every text"
        name = ("layer." if match[2] else "") + stored[match.end() :]
        if _IGNORED.fullmatch(name):
            return []
        repeated = [f"{self._names[name]} and {stored} are the same tensor"] if name in self._names else []
        self._names[name], self._slices[name] = stored, value
        return repeated

    def _check(self, problems: list[str]) -> None:
        optional, tables = {EMBEDDING, _TO_DRAFT}, (_TO_MODEL, _TO_DRAFT)
        if self._config.draft_vocab_size == self._config.layer.vocab_size:
            optional.add(_TO_MODEL)
        expected = {}
        for name, shape in expected_shapes(self._config).items():
            types = ("I64", "I32", "BOOL", "U8") if name in tables else tuple(DTYPES)
            expected[self._names.get(name, name)] = Part((shape,), types, is_required=name not in optional)
        missing, others = faults_of({self._names[name]: value for name, value in self._slices.items()}, expected)
        problems += missing + others
        if problems:
            raise ValueError(f"{self._folder} does not hold this {self._config.form} head: " + "; ".join(problems))


def expected_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a head's tensors. All except the embedding and the tables must be in the files."""
    layer, is_third = config.layer, config.form is EagleForm.EAGLE3
    embed, vocab, inputs = layer.hidden_size, layer.vocab_size, (1 + is_third) * layer.hidden_size
    shapes = {f"layer.{name}.weight": shape for name, shape in layer_shapes(layer).items() if name != "input_layernorm"}
    for key in ("layer.self_attn.q_proj.weight", "layer.self_attn.k_proj.weight", "layer.self_attn.v_proj.weight"):
        shapes[key] = (shapes[key][0], inputs)
    shapes |= {
        EMBEDDING: (vocab, embed),
        "fc.weight": (embed, NUM_TAPS * config.model_width if is_third else 2 * embed),
    }
    if is_third:
        norms = ("layer.input_layernorm.weight", "layer.hidden_norm.weight", "norm.weight")
        shapes |= dict.fromkeys(norms, (embed,))
        shapes |= {"lm_head.weight": (config.draft_vocab_size, embed)}
        shapes |= {_TO_MODEL: (config.draft_vocab_size,), _TO_DRAFT: (vocab,)}
    return shapes


def load_head(
    folder: Path, config: EagleConfig, *, dtype: Any, mesh: Mesh | None = None, has_embedding: bool
) -> EagleHead:
    """The head in a folder on `mesh`, cast to `dtype`. Raises ValueError if the files are damaged.

    Args:
        has_embedding: loads the head's own embedding.
    """
    head = abstract_head(config, dtype=dtype, mesh=mesh, has_embedding=has_embedding)
    files, num_shards = HeadFiles(folder, config), num_shards_of(mesh)
    read = partial(read_source, files, config=config.layer, num_shards=num_shards)

    def make(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        parts = _SOURCES[path]
        raw = [read(part, sharding=like.sharding) for part in parts]
        groups = num_shards if len(parts) > 1 else 1
        return jax.block_until_ready(join(raw, groups=groups, dtype=like.dtype, sharding=like.sharding))

    filled = _filled(head, files.tokens(), make)
    files.check_unchanged()
    return filled


def random_head(config: EagleConfig, *, seed: int, **form: Any) -> EagleHead:
    """A head with random weights, which are made on the chips. It drafts the first tokens of the vocabulary. `form`:
    arguments of `abstract_head`."""
    head = abstract_head(config, **form)
    seeds = seeds_of(head, seed)

    def make(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        return random_values(next(seeds), likes=((path, like),))[path]

    return _filled(head, np.arange(config.draft_vocab_size, dtype=np.int32), make, threads=1)


def _filled(
    head: EagleHead, tokens: np.ndarray, make: Callable[[str, jax.ShapeDtypeStruct], jax.Array], **options: int
) -> EagleHead:
    """Fills the head's parameters by `make`, and its vocabulary tables from `tokens`: i32[draft_vocab_size], the
    model's token of each draft token."""
    to_draft = np.full(head.eagle.layer.vocab_size, -1, np.int32)
    to_draft[tokens] = np.arange(len(tokens), dtype=np.int32)
    tables = {"to_model": tokens, "to_draft": to_draft}

    def made(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(tables[path], like.sharding) if path in tables else make(path, like)

    return fill_each(head, made, **options)
