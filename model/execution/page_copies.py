"""Copies of pages from the device to the host's memory and back.

A copy holds all that the state keeps of N pages: the K/V of all layers and, if there are drafts, the tokens and the
draft network's part. It is a list of few arrays [N, L, ...]. Each combines L arrays of the state with the same shape,
such as the layers of a network. They are split over chips in the same way as these arrays, so chips exchange nothing.

In the host's memory, a page is one row of bytes: for each of these arrays, the parts of all chips, one after the other.
A part that several chips hold is stored once. The bytes are valid only for the same model, form of pages and number of
chips.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from batcher.step import pages_of_small_copy
from model.compiling.program import Program
from model.execution.adapter_arrays import bytes_of
from model.execution.step import DeviceState

# Most bytes of a copy on a device. A link of 32 GB/s moves them in a millisecond. The fixed costs of a copy are less.
COPY_BYTES = 32 << 20
MAX_PAGES_OF_COPY = 64
NULL_PAGE = 0

Copy = list[jax.Array]
Index = tuple[tuple[int, int, int], ...]  # (start, stop, step) of each axis, which identify a part of an array


def pages_of_copy(page: int) -> int:
    """The most pages of a copy. `page`: the bytes of one page on a device."""
    return min(max(1, COPY_BYTES // page), MAX_PAGES_OF_COPY)


class PageCopies:
    """The shapes of the copies of a runner's pages, and the programs that read and write them.

    There are two sizes of copies, large and small. A copy is always sent completely, with padding. With only one size,
    a single page would take as long as the most pages. Each further size would be two more programs to compile.

    Args:
        state: the shapes and shardings of the state.
        kv_axis: the axis of a layer's K/V along which the pages are.
    """

    def __init__(self, state: DeviceState, kv_axis: int) -> None:
        one = _described(state, 1, kv_axis)
        self.page_bytes = sum(like.size * like.dtype.itemsize for like in one)
        self.contents = str([(like.shape[1:], like.dtype.name) for like in one])  # describes the bytes of a page
        self.most = pages_of_copy(bytes_of(one))
        self._forms = {size: _described(state, size, kv_axis) for size in {pages_of_small_copy(self.most), self.most}}
        self._state = state
        self._kv_axis = kv_axis
        self._num_pages = state.kv[0].shape[kv_axis]

    def programs(self, sent: Any) -> dict[str, Program]:
        """The programs that read and write copies of each size, by `name`. `sent(shape)` describes an i32 array from
        the host."""
        kept = _shardings(self._state)
        programs = {}
        for size, form in self._forms.items():
            pages = sent((size,))
            reading, writing = partial(read, kv_axis=self._kv_axis), partial(write, kv_axis=self._kv_axis)
            programs[self.name("read", size)] = Program(
                reading, (self._state, pages), donated=(), out_shardings=_shardings(form)
            )
            programs[self.name("write", size)] = Program(
                writing, (self._state, form, pages), donated=(0,), out_shardings=kept
            )
        return programs

    @property
    def sizes(self) -> list[int]:
        return sorted(self._forms)

    @staticmethod
    def name(kind: str, size: int) -> str:
        return f"{kind} {size} pages"

    def read(self, programs: Mapping[int, Any], state: DeviceState, pages: Sequence[int]) -> PagesRead:
        """Starts a copy of these pages to the host. `programs` are the compiled programs by size. The null page pads
        the copy."""
        padded = np.full(self._size_of(len(pages)), NULL_PAGE, np.int32)
        padded[: len(pages)] = pages
        return PagesRead(programs[padded.size](state, padded), len(pages))

    def write(
        self, programs: Mapping[int, Any], state: DeviceState, staged: StagedPages, pages: Sequence[int]
    ) -> DeviceState:
        """Writes a staged copy to these pages, and deletes it. `programs` are the compiled programs by size. Padding
        has page ids past the end, which are dropped."""
        padded = np.arange(self._num_pages, self._num_pages + staged.size, dtype=np.int32)
        padded[: len(pages)] = pages
        state = programs[staged.size](state, staged.copy, padded)
        for array in staged.copy:
            array.delete()
        return state

    def stage(self, pages: Sequence[np.ndarray]) -> StagedPages:
        """Copies pages u8[page_bytes] to the devices. Blocks until they have arrived."""
        form = self._forms[self._size_of(len(pages))]
        copy, stop = [], 0
        for like in form:
            parts: dict[Index, np.ndarray] = {}
            of_devices = like.sharding.addressable_devices_indices_map(like.shape).values()
            for index in sorted({_ranges(index, like.shape) for index in of_devices if index is not None}):
                values = np.empty([len(range(*axis)) for axis in index], like.dtype)
                start, stop = stop, stop + values[0].nbytes
                for value, page in zip(_bytes(values), pages, strict=False):
                    value[:] = page[start:stop]
                parts[index] = values
            part = partial(_part, parts, like.shape)
            copy.append(jax.make_array_from_callback(like.shape, like.sharding, part))
        return StagedPages(jax.block_until_ready(copy))

    def _size_of(self, count: int) -> int:
        """The size of the copy for `count` pages."""
        assert count <= self.most, f"a copy has {self.most} pages at most: {count=}"
        return min(size for size in self._forms if size >= count)


@dataclass(frozen=True)
class StagedPages:
    """A copy on the devices. It implements `batcher.step.StagedPages`."""

    copy: Copy

    @property
    def size(self) -> int:
        return self.copy[0].shape[0]


class PagesRead:
    """A copy on its way to the host. It implements `batcher.step.PagesRead`. The transfer of all parts starts at once.
    A part that several devices hold comes from one of them."""

    def __init__(self, copy: Copy, count: int) -> None:
        self._count = count
        self._parts: list[jax.Array] = []
        for array in copy:
            parts = {_ranges(shard.index, array.shape): shard.data for shard in array.addressable_shards}
            self._parts += [parts[index] for index in sorted(parts)]
        for part in self._parts:
            part.copy_to_host_async()

    def copy_to(self, pages: Sequence[np.ndarray]) -> None:
        assert len(pages) == self._count, f"{self._count} pages were read: {len(pages)=}"
        parts, self._parts, stop = self._parts, [], 0
        for part in parts:
            values = _bytes(np.asarray(part))
            start, stop = stop, stop + values.shape[1]
            for page, value in zip(pages, values, strict=False):
                page[start:stop] = value


def read(state: DeviceState, pages: jax.Array, *, kv_axis: int) -> Copy:
    """The copy of the pages i32[N]."""

    def taken(array: jax.Array, axis: int) -> jax.Array:
        values = jnp.moveaxis(jnp.take(array, pages, axis=axis, mode="clip"), axis, 0)
        return lax.bitcast_convert_type(values, _bits_of(array.dtype))

    return [jnp.stack([taken(array, axis) for array in arrays], axis=1) for arrays, axis in _with_pages(state, kv_axis)]


def write(state: DeviceState, copy: Copy, pages: jax.Array, *, kv_axis: int) -> DeviceState:
    """The state with the copy written to the pages i32[N], which all differ. Page ids past the end are dropped. Compile
    it with the state donated."""

    def placed(array: jax.Array, axis: int, values: jax.Array) -> jax.Array:
        index = (slice(None),) * axis
        values = lax.bitcast_convert_type(jnp.moveaxis(values, 0, axis), array.dtype)
        return array.at[*index, pages].set(values, mode="drop", unique_indices=True)

    written = [
        [placed(array, axis, part[:, layer]) for layer, array in enumerate(arrays)]
        for (arrays, axis), part in zip(_with_pages(state, kv_axis), copy, strict=True)
    ]
    return _replaced(state, written)


def _with_pages(state: DeviceState, kv_axis: int) -> list[tuple[list[jax.Array], int]]:
    """The arrays of the state that have pages, and the axis along which the pages are. Arrays of the same shape are in
    one list."""
    found = [(state.kv, kv_axis)]
    if state.text is not None:
        found.append(([state.text], 0))
    if state.draft is not None:
        found += [(state.draft.kv, kv_axis), ([state.draft.filled], 0)]
        if state.draft.features is not None:
            found.append(([state.draft.features], 0))
    return found


def _replaced(state: DeviceState, arrays: Iterable[list[jax.Array]]) -> DeviceState:
    """The state with these arrays in place of those of `_with_pages`, in the same order."""
    structure = jax.tree.structure((state.kv, state.text, state.draft))
    kv, text, draft = jax.tree.unflatten(structure, chain.from_iterable(arrays))
    return replace(state, kv=kv, text=text, draft=draft)


def _described(state: DeviceState, size: int, kv_axis: int) -> list[Any]:
    """The ShapeDtypeStructs of a copy of `size` pages."""
    described = []
    for arrays, axis in _with_pages(state, kv_axis):
        array: Any = arrays[0]
        shape = (size, len(arrays), *array.shape[:axis], *array.shape[axis + 1 :])
        sharding = _of_copy(array.sharding, axis, array.ndim)
        described.append(jax.ShapeDtypeStruct(shape, _bits_of(array.dtype), sharding=sharding))
    return described


def _bits_of(dtype: Any) -> Any:
    """The unsigned integer type with as many bits. A CPU moves floats of 16 bits as float32, which loses the smallest
    values."""
    return jnp.dtype(f"uint{8 * dtype.itemsize}")


def _of_copy(sharding: Sharding, page_axis: int, ndim: int) -> Sharding:
    """The sharding of an array of a copy, if the arrays of the state have this sharding."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    del axes[page_axis]
    axes = [None, None, *axes]
    while axes and axes[-1] is None:
        axes.pop()
    return NamedSharding(sharding.mesh, P(*axes))


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(axis.indices(size) for axis, size in zip(index, shape, strict=True))


def _part(parts: Mapping[Index, np.ndarray], shape: tuple[int, ...], index: tuple[slice, ...] | None) -> np.ndarray:
    assert index is not None
    return parts[_ranges(index, shape)]


def _bytes(values: np.ndarray) -> np.ndarray:
    """The bytes u8[N, bytes of a page] of values [N, ...]. It is a view if the values are contiguous."""
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)


def _shardings(described: Any) -> Any:
    return jax.tree.map(lambda like: like.sharding, described)
