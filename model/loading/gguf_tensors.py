"""The tensors of a GGUF file under their names in the Hugging Face form, read by slices.

Import this module only for a GGUF file: importing `gguf`, the package that dequantises the blocks, takes half a second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from model.config import LlamaConfig
from model.families import Family
from model.inputs.gguf import GgufFile, GgufTensor, parts_of
from model.loading import gguf_config
from model.loading.gguf_groups import EXACT, FOUR_BIT, Type, kept_part
from model.loading.hf_format import EMBEDDING, HEAD, by_path, expected_kernels, expected_shapes, in_layer
from model.loading.remote_tensors import LocalFile
from model.loading.tensors import Checkpoint, Contents, Reader
from model.quantization.forms import (
    HEAD_PATH,
    Activations,
    EightBit,
    FourBit,
    MixedForms,
    WeightForm,
    largest_group,
)
from pallas_kernels.cpu.products import PANEL

FLOATS: Mapping[Type, np.dtype] = {
    Type.F32: np.dtype("<f4"),
    Type.F16: np.dtype("<f2"),
    Type.BF16: np.dtype(ml_dtypes.bfloat16),
}
_OF_FOUR_BITS = {Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.IQ4_NL, Type.IQ4_XS}
BLOCKS = (
    Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.IQ4_NL,
    Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS,
    Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S,
    Type.TQ1_0, Type.TQ2_0, Type.MXFP4,
)  # fmt: skip
_TOP = {
    EMBEDDING.key: gguf_config.EMBEDDING,
    HEAD.key: gguf_config.HEAD,
    "model.norm.weight": "output_norm.weight",
}
MOST_FAULTS = 8  # that an error names
_ROWS_AT_ONCE = 1024  # rows that are dequantised together; bounds the temporary memory


class GgufTensors(Checkpoint):
    """The tensors of a file by name, with the interface of `TensorFiles`.

    Raises:
        ValueError: the file is incomplete, or its tensors are not those of `config`. The message names each tensor that
            is missing, unexpected, mis-shaped or of an unreadable type.
    """

    def __init__(self, path: Path, config: LlamaConfig):
        self._path = path
        self.versions = {file: file.version() for file in map(LocalFile, parts_of(path))}
        self._config = config
        file = GgufFile.read(path)
        self._tensors = file.tensors  # in the order of the file
        self._check()
        check_places(file)

    def contents(self) -> Contents:
        """The file's metadata and tensors have already decided whether the head is tied. If projections are quantised,
        `dtypes` has neither their types nor the head's."""
        kernels = expected_kernels(self._config).keys()
        types = {self._type(key) for key in kernels - {HEAD.key}}
        blocks = sorted(type.name for type in types if type in BLOCKS)
        used = {self._type(key) for key in expected_shapes(self._config).keys() - (kernels if blocks else set())}
        dtypes = sorted(FLOATS[type].name if type in FLOATS else type.name for type in used)
        if not blocks:
            return Contents(config=self._config, dtypes=tuple(dtypes))
        four_bit, fault = self._in_four_bits(types)
        return Contents(
            config=self._config,
            dtypes=tuple(dtypes),
            quantization=EightBit.INT8,
            activations=Activations.BLOCKS,  # as llama.cpp rounds inputs
            packing=f"GGUF {' and '.join(blocks)}",
            four_bit=four_bit,
            exact_form=self._in_exact_form(),
            four_bit_fault=fault,
        )

    def _in_four_bits(self, types: Set[Type]) -> tuple[FourBit | None, str | None]:
        """The form by which chips hold projections of these types without requantising them, or the reason why there is
        none. Both are None if no projection has 4 bits."""
        if not types & _OF_FOUR_BITS:
            return None, None
        if len(types) > 1 or not types <= FOUR_BIT.keys():
            return None, f"its projections are not all {' or all '.join(type.name for type in FOUR_BIT)}"
        (type,) = types
        form = FOUR_BIT[type]
        is_whole = largest_group((form.group, *self._config.projection_inputs)) == form.group
        return (form, None) if is_whole else (None, f"groups of {form.group} do not divide the numbers of inputs")

    def _in_exact_form(self) -> WeightForm | None:
        """The form of 4 and 6 bits that keeps all stored numbers; None if no projection has one. Tensors of other types
        become int8."""
        forms = dict(by_path(self._exact_form_of, self._config))
        counts = Counter(form for form in forms.values() if form.is_grouped)
        if not counts:
            return None
        (most, _), *_ = counts.most_common(1)
        head = self._exact_form_of(HEAD.key, panels_only=True)
        others = {path: form for path, form in forms.items() if form != most}
        others |= {HEAD_PATH: head} if head != most.in_head else {}
        return MixedForms(most=most, others=tuple(sorted(others.items()))) if others else most

    def _exact_form_of(self, key: str, *, panels_only: bool = False) -> WeightForm:
        """The form that keeps a tensor's numbers, or int8. With `panels_only`, a tensor whose outputs are no whole
        panels of the C code is in int8, which XLA multiplies faster."""
        form = EXACT.get(self._type(key), EightBit.INT8)
        is_cut = any(width % form.whole for width in self._config.projection_inputs) and key != HEAD.key
        is_slow = panels_only and self.shape(key)[0] % PANEL != 0
        return EightBit.INT8 if is_cut or is_slow else form

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor. Its values are not read."""
        return self._tensor(key).shape

    def reader(self, key: str, rows: slice) -> Reader:
        """A function that reads the part of a tensor at an index."""
        return partial(self._read, key)

    def _read(self, key: str, index: tuple[slice, ...]) -> np.ndarray:
        """The part of a tensor at `index`. Quantised blocks are dequantised to float32."""
        tensor = self._tensor(key)
        *rows, columns = (np.arange(size)[part] for part, size in zip(index, tensor.shape, strict=True))
        chosen = stored_rows(key, self._config, rows[0]) if rows else np.zeros(1, np.int64)
        values = values_of(tensor, chosen, int(columns[0]), int(columns[-1]) + 1)
        return values if rows else values[0]

    def kept_reader(self, name: str, key: str, form: WeightForm) -> Reader:
        """A function that reads the part at an index of the parameter `name` of a kernel in `form`."""
        return partial(self._read_kept, name, key, form)

    def _read_kept(self, name: str, key: str, form: WeightForm, index: tuple[slice, ...]) -> np.ndarray:
        tensor = self._tensor(key)
        num_out, num_in = tensor.shape
        # Inputs that share a number. Whole groups are read: a shard of a kernel has them (`sharding.check_groups`).
        size = form.inputs_of(name)
        rows = stored_rows(key, self._config, np.arange(num_out)[index[0]])
        columns = np.arange(num_in // size)[index[1]] * size
        first, end = int(columns[0]), int(columns[-1]) + size
        part = partial(kept_part, form, name, Type(tensor.type))
        with np.errstate(invalid="ignore", over="ignore"):  # as in `values_of`
            blocks = _blocks(tensor, rows)
            return np.concatenate([part(some, first, end) for some in blocks])

    def _type(self, key: str) -> Type:
        return Type(self._tensor(key).type)

    def _tensor(self, key: str) -> GgufTensor:
        """The stored tensor for a name in Hugging Face's form. A tied head gives the embedding."""
        is_tied = key == HEAD.key and self._config.tie_word_embeddings
        return self._tensors[name_of(EMBEDDING.key if is_tied else key, self._config.family)]

    def _check(self) -> None:
        expected = {name_of(key, self._config.family): shape for key, shape in expected_shapes(self._config).items()}
        missing, extra = expected.keys() - self._tensors.keys(), self._tensors.keys() - expected.keys()
        extra -= {gguf_config.ROPE_FACTORS}
        problems = [f"missing: {', '.join(sorted(missing))}"] if missing else []
        problems += [f"unexpected: {', '.join(sorted(extra))}"] if extra else []
        for name in sorted(expected.keys() & self._tensors.keys()):
            problems += [f"{name} {problem}" for problem in faults_of(self._tensors[name], expected[name])]
        if len(problems) > MOST_FAULTS:
            problems[MOST_FAULTS:] = [f"and {len(problems) - MOST_FAULTS} other faults"]
        if problems:
            raise ValueError(f"{self._path} does not hold this model's weights: {'; '.join(problems)}")


def stored_rows(key: str, config: LlamaConfig, rows: np.ndarray) -> np.ndarray:
    """The indices at which these rows of the tensor `key` are stored. The rows of a Llama's q and k differ: the pairs
    that are rotated are neighbours in llama.cpp, and in Hugging Face's form they are in the two halves of a head."""
    if not key.startswith("model.layers.") or not (tensor := in_layer(key, config.family)[1]).has_pairs:
        return rows
    stored = np.arange(config.sizes[tensor.shape[0]]).reshape(-1, config.head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)[rows]


def check_places(file: GgufFile) -> None:
    """Checks that each tensor begins at the first aligned byte after the tensor before it, as the format requires. A
    tensor at another place would be read from the bytes of other tensors.

    Raises:
        ValueError: a tensor is at another place, or the file or a part of it is cut off.
    """
    for part in (file, *file.others):
        begin = end = part.start
        for name, tensor in part.tensors.items():
            if tensor.path != part.path:
                continue  # the first part names the tensors of all
            if tensor.offset != begin:
                raise ValueError(
                    f"{part.path}: {name} is at byte {tensor.offset} and should be at {begin}, next to the tensor "
                    "before it: the file is damaged, download it again"
                )
            end = begin + num_bytes_of(tensor)
            begin = -(-end // part.alignment) * part.alignment
        if end > (num_bytes := part.path.stat().st_size):
            raise ValueError(f"{part.path} is cut off: it has {num_bytes} bytes, and its tensors end at {end}")


def faults_of(tensor: GgufTensor, shape: tuple[int, ...]) -> list[str]:
    """The faults of a tensor that should have this shape, each as words that follow the tensor's name."""
    readable = (*FLOATS, *BLOCKS)
    if tensor.type not in readable:
        name = Type(tensor.type).name if tensor.type in Type else tensor.type
        return [f"has type {name}, not one of {', '.join(type.name for type in readable)}"]
    if tensor.shape != shape:
        return [f"has shape {tensor.shape}, not {shape}"]
    per_block, _ = GGML_QUANT_SIZES[Type(tensor.type)]
    whole = shape[-1] % per_block == 0
    return [] if whole else [f"has rows of {shape[-1]} values, which are no whole blocks of {per_block}"]


def name_of(key: str, family: Family) -> str:
    """The name in GGUF of a tensor with this name in Hugging Face's form."""
    if key in _TOP:
        return _TOP[key]
    layer, tensor = in_layer(key, family)
    return f"blk.{layer}.{tensor.gguf}.weight"


def num_bytes_of(tensor: GgufTensor) -> int:
    """The number of bytes of a tensor's values. Its type must be known."""
    per_block, block_bytes = GGML_QUANT_SIZES[Type(tensor.type)]
    return math.prod(tensor.shape) // per_block * block_bytes


def _blocks(tensor: GgufTensor, rows: np.ndarray) -> Iterator[np.ndarray]:
    """u8[rows, blocks of a row, bytes of a block]: these rows, some at a time."""
    per_block, block_bytes = GGML_QUANT_SIZES[Type(tensor.type)]
    num_blocks = tensor.shape[-1] // per_block
    row_bytes = num_blocks * block_bytes
    file = LocalFile(tensor.path)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[start : start + _ROWS_AT_ONCE]
        low, high = int(some.min()), int(some.max()) + 1  # the rows are adjacent, except for the order in q and k
        stored = file.read_range(tensor.offset + low * row_bytes, tensor.offset + high * row_bytes)
        yield stored.reshape(high - low, num_blocks, block_bytes)[some - low]


def values_of(tensor: GgufTensor, rows: np.ndarray, first: int, end: int) -> np.ndarray:
    """The values [rows, end - first] of these rows, from column `first` up to `end`. Blocks are dequantised."""
    type = Type(tensor.type)
    per_block, _ = GGML_QUANT_SIZES[type]
    first_block, end_block = first // per_block, -(-end // per_block)
    within = slice(first - first_block * per_block, end - first_block * per_block)
    parts = []
    for blocks in _blocks(tensor, rows):
        flat = blocks[:, first_block:end_block].reshape(len(blocks), -1)
        with np.errstate(invalid="ignore", over="ignore"):  # infinite scales make NaN, as in other formats
            wide = flat.view(FLOATS[type]) if type in FLOATS else dequantize(flat, type)
        parts.append(np.asarray(wide)[:, within])
    return np.concatenate(parts)
