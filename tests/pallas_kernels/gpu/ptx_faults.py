"""Kernels with a planted fault, executed as PTX for a target that is not here, and what is reported.

`python -m tests.pallas_kernels.gpu.ptx_faults a100 [NAME ...]` prints a JSON object per case, of this target's list
(default: all): its name and the findings. A process executes kernels of one target only.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import append, attention, matmul, tile_list
from scripts.lab.ptx import cases
from scripts.lab.ptx.cases import SHAPES, Shape
from tests.pallas_kernels.gpu import faults, ptx_faults_hopper
from tests.pallas_kernels.gpu.planted import Planted


def without(pattern: str) -> Callable[[str], str]:
    """Leaves out the first line of the decode kernel that matches the pattern."""

    def edit(ptx: str) -> str:
        changed, count = re.subn(pattern, "//", ptx, count=1, flags=re.MULTILINE)
        assert count or "paged_decode" not in ptx
        return changed if "paged_decode" in ptx else ptx

    return edit


# The barrier between the warps' parts of a sum in shared memory and their reading.
BEFORE_SUMS = r"^\s*bar\.sync[^\n]*;$(?=(?:\n[^\n]*){1,6}\n\s*ld\.shared\.v4)"


def rows_of_pairs(count: Any, shape: tuple[int, ...], layout: Any) -> Any:
    """The mask that numbers both keys of a register as the first of them."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) < lax.convert_element_type(count, jnp.int32)


def rows_behind_the_table(kv_lens: Any, *args: Any, **options: Any) -> Any:
    """Tiles of padding name row S, which the page table has not."""
    work = tile_list.prefill_tiles(kv_lens, *args, **options)
    padding = work.tiles[:, tile_list.TILE_KV_LEN] == 0
    row = jnp.where(padding, kv_lens.shape[0], work.tiles[:, tile_list.TILE_ROW])
    tiles = work.tiles.at[:, tile_list.TILE_ROW].set(row)
    return tile_list.TileList(tiles=tiles, num_tiles=work.num_tiles, merges=work.merges, num_merges=work.num_merges)


def append_padding_to_page_0(kv_pages: Any, keys: Any, values: Any, pages: Any, slots: Any) -> Any:
    return whole_append(kv_pages, keys, values, jnp.where(pages < kv_pages.shape[0], pages, 0), slots)


whole_append = append.append
WITH_CP_ASYNC = {
    "none, decode": Planted(shape="decode", expected=""),
    "none, a padding tile": Planted(shape="a padding tile", expected=""),
    "one mask for a pair": Planted(
        shape="decode",
        expected=r"weights 0 with NaN, not masked: paged_decode line \d+",
        patches={(matmul, "rows_before"): rows_of_pairs},
    ),
    "a padding tile's row": Planted(
        shape="a padding tile",
        expected=r"out of bounds: line \d+ \(ring\.py.*ld\.global.*\n.*page_table",
        patches={(attention, "prefill_tiles"): rows_behind_the_table},
    ),
    "a padding token appended": Planted(
        shape="a padding tile",
        expected=r"the pages are wrong in \d+ slots: page 0, slot \d+, which is no token's",
        patches={(append, "append"): append_padding_to_page_0},
    ),
    "no barrier": Planted(shape="decode", expected=r"race: line \d+ \(online_softmax.py", edit=without(BEFORE_SUMS)),
    "no wait": Planted(
        shape="decode",
        expected="under way.*ldmatrix.*\n.*cp.async of warp",
        edit=without(r"^\s*cp\.async\.wait_group.*;$"),
    ),
}


def of_the_interpreter(fault: faults.Fault) -> Planted:
    """A fault that interpret mode finds, on the chip that it is of."""
    spec = fault.spec
    shape = Shape(
        rows=tuple((row.query_len, row.kv_len) for row in fault.rows),
        heads=(spec.num_query_heads, spec.num_kv_heads, spec.head_dim),
        page_size=spec.page_size,
        kv_dtype=str(jnp.dtype(spec.kv_dtype)),
        multiprocessors=fault.gpu.num_multiprocessors,
        parts=fault.parts,
    )
    return Planted(shape=shape, expected="." if fault.patches else "", patches=fault.patches)


def interpreted(arch: tuple[int, int]) -> dict[str, Planted]:
    known = faults.NO_FAULT | faults.FAULTS | faults.MAY_HANG
    del known["no wait, cp.async"]  # its replacement has a fence that the chip has not; "no wait" is the same
    return {name: of_the_interpreter(fault) for name, fault in known.items() if fault.gpu.arch == arch}


FAULTS = {
    "a100": WITH_CP_ASYNC | interpreted((8, 0)),
    "h100": ptx_faults_hopper.FAULTS | interpreted((9, 0)),
    "b200": interpreted((10, 0)),
}


def findings(target: str, planted: Planted) -> str:
    with contextlib.ExitStack() as patches:
        for (owner, name), new in planted.patches.items():
            patches.enter_context(mock.patch.object(owner, name, new))
        shape = planted.shape if isinstance(planted.shape, Shape) else SHAPES[planted.shape]
        return str(cases.run(shape, target, cases.schedules(3), edit=planted.edit))


if __name__ == "__main__":
    target, *names = sys.argv[1:]
    for name in names or FAULTS[target]:
        print(json.dumps({"name": name, "findings": findings(target, FAULTS[target][name])}), flush=True)
