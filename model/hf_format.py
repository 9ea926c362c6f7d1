"""The Hugging Face form of a Llama: which tensors fill which parameter, their shapes, and the files they lie in."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from model.config import LlamaConfig, read_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
READABLE_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Source:
    """One tensor of the checkpoint."""

    key: str
    is_kv: bool = False  # rows are KV heads: repeated where chips outnumber them


EMBEDDING = Source("model.embed_tokens.weight")
HEAD = Source("lm_head.weight")

# Parameter -> the tensors that fill it, one below the other. Both are [out, in].
_TOP: dict[str, tuple[Source, ...]] = {
    "embedding": (EMBEDDING,),
    "norm.scale": (Source("model.norm.weight"),),
    "head": (HEAD,),
}
_LAYER: dict[str, tuple[Source, ...]] = {
    "attention_norm.scale": (Source("input_layernorm.weight"),),
    "attention.qkv": (
        Source("self_attn.q_proj.weight"),
        Source("self_attn.k_proj.weight", is_kv=True),
        Source("self_attn.v_proj.weight", is_kv=True),
    ),
    "attention.out": (Source("self_attn.o_proj.weight"),),
    "mlp_norm.scale": (Source("post_attention_layernorm.weight"),),
    "mlp.gate_up": (Source("mlp.gate_proj.weight"), Source("mlp.up_proj.weight")),
    "mlp.down": (Source("mlp.down_proj.weight"),),
}
# Constants that older exporters wrote among the weights; the config says them better.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def sources(path: str) -> tuple[Source, ...]:
    """The tensors of the parameter at `path` ("layers.3.mlp.down"), in the order in which they are joined."""
    if path in _TOP:
        return _TOP[path]
    _, layer, name = path.split(".", 2)
    return tuple(Source(f"model.layers.{layer}.{s.key}", s.is_kv) for s in _LAYER[name])


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must hold."""
    embed, mlp, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING.key: (vocab, embed), "model.norm.weight": (embed,)}
    if not config.tie_word_embeddings:
        shapes[HEAD.key] = (vocab, embed)
    layer = {
        "input_layernorm": (embed,),
        "self_attn.q_proj": (queries, embed),
        "self_attn.k_proj": (keys, embed),
        "self_attn.v_proj": (keys, embed),
        "self_attn.o_proj": (embed, queries),
        "post_attention_layernorm": (embed,),
        "mlp.gate_proj": (mlp, embed),
        "mlp.up_proj": (mlp, embed),
        "mlp.down_proj": (embed, mlp),
    }
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


class TensorFiles:
    """The safetensors files of one checkpoint folder, opened together. Slices are read from disk when asked for."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._stack = ExitStack()
        self._slices: dict[str, Any] = {}
        self._lacking: dict[str, set[str]] = {}  # file name -> tensors that the index promises in it
        self._repeated: set[str] = set()

    def __enter__(self) -> Self:
        try:
            for name, keys in self._files().items():
                self._open(name, keys)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._slices.clear()
        self._stack.close()

    def _files(self) -> dict[str, list[str] | None]:
        """File name -> the keys that the index promises in it (None: whatever is there)."""
        index = self._folder / INDEX_FILE
        if index.exists():
            weight_map = read_object(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index} has no weight_map")
            promised: dict[str, list[str] | None] = defaultdict(list)
            for key, name in weight_map.items():
                promised[name].append(key)
            absent = [name for name in promised if not (self._folder / name).exists()]
            if absent:
                raise ValueError(f"{index} names files that are not there: {', '.join(sorted(absent))}")
            return dict(promised)
        names = [SINGLE_FILE] if (self._folder / SINGLE_FILE).exists() else []
        names = names or sorted(path.name for path in self._folder.glob("*.safetensors"))
        if not names:
            raise ValueError(f"no safetensors files in {self._folder} (other weight formats are not read)")
        return dict.fromkeys(names)

    def _open(self, name: str, promised: list[str] | None) -> None:
        path = self._folder / name
        try:
            file = self._stack.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
        keys = set(file.keys())
        if absent := set(promised or ()) - keys:
            self._lacking[name] = absent
        self._repeated |= self._slices.keys() & keys
        self._slices |= {key: file.get_slice(key) for key in keys}

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slices[key].get_shape())

    def read(self, key: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._slices[key][index]

    def check(self, config: LlamaConfig) -> None:
        """Raises ValueError naming every tensor that is missing, repeated, unexpected, mis-shaped or of an unreadable
        type."""
        expected = expected_shapes(config)
        missing = expected.keys() - self._slices.keys() - set().union(*self._lacking.values())
        extra = {key for key in self._slices.keys() - expected.keys() if not _IGNORED.fullmatch(key)}
        if config.tie_word_embeddings:
            # Some exporters write the tied head too. The reference implementation reads the embedding; so do we.
            extra.discard(HEAD.key)
        present = expected.keys() & self._slices.keys()
        problems = [
            f"{name} lacks tensors that the index promises: {_grouped(keys)}" for name, keys in self._lacking.items()
        ]
        problems += [f"missing: {_grouped(missing)}"] if missing else []
        problems += [f"in more than one file: {_grouped(self._repeated)}"] if self._repeated else []
        problems += [f"unexpected: {_grouped(extra)}"] if extra else []
        problems += _by_message(
            (f"has shape {self.shape(key)}, not {expected[key]}", key)
            for key in present
            if self.shape(key) != expected[key]
        )
        problems += _by_message(
            (f"has type {self._slices[key].get_dtype()}, not one of {', '.join(READABLE_DTYPES)}", key)
            for key in present
            if self._slices[key].get_dtype() not in READABLE_DTYPES
        )
        if problems:
            raise ValueError(f"{self._folder} does not hold this model's weights: " + "; ".join(problems))


def _by_message(pairs: Iterable[tuple[str, str]]) -> list[str]:
    grouped = defaultdict(list)
    for message, key in pairs:
        grouped[message].append(key)
    return [f"{_grouped(keys)} {message}" for message, keys in sorted(grouped.items())]


def _grouped(keys: Iterable[str]) -> str:
    """Names all keys; layers that lack the same tensor share one name: model.layers.{0,1,2}.mlp.up_proj.weight."""
    layers: dict[str, list[int]] = defaultdict(list)
    for key in keys:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", key)
        if match:
            layers[match[2]].append(int(match[1]))
        else:
            layers[key] = []
    return ", ".join(
        f"model.layers.{{{','.join(map(str, sorted(numbers)))}}}.{name}" if numbers else name
        for name, numbers in sorted(layers.items())
    )
