"""Faults of Hopper's prefill in its products, its copies, its mbarriers and its registers (see `ptx_faults`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pallas_kernels.gpu import online_softmax, prefill_hopper
from scripts.lab.ptx.tma import TensorMap
from tests.pallas_kernels.gpu.planted import Planted


def changed(pattern: str, new: str, count: int = 0) -> Callable[[str], str]:
    """Changes lines of the prefill that match the pattern: all, or the first ones."""

    def edit(ptx: str) -> str:
        if "paged_prefill" not in ptx:
            return ptx
        found, made = re.subn(pattern, new, ptx, count=count, flags=re.MULTILINE)
        assert made, pattern
        return found

    return edit


_Run = prefill_hopper._Run
softmax, encoded = _Run.softmax, TensorMap.encoded


def softmax_with_converted_weights(self: Any, *args: Any, masked: bool) -> Any:
    """The softmax of a block converts its weights while those of the block before are multiplied."""
    step = online_softmax.step

    def converting(*operands: Any) -> Any:
        weights, *others = step(*operands)
        return weights.astype(self.body.dtype), *others

    online_softmax.step = converting
    try:
        return softmax(self, *args, masked=masked)
    finally:
        online_softmax.step = step


def start_values(self: Any, i: Any, acc: Any, weights: Any) -> None:
    slot = self.slot(i)
    self.acc[...] = acc
    prefill_hopper.plgpu.barrier_wait(self.refs.arrived.at[2 * slot + 1])
    prefill_hopper.matmul.start_wgmma(self.acc, weights, self.refs.v_smem.at[slot], interpret=None)


def output_without_swizzle(array: Any, *args: Any, **options: Any) -> TensorMap:
    made = encoded(array, *args, **options)
    return replace(made, swizzle=16) if array.name == "output" else made


EXPECT_KEYS = r"(mov\.b32 \t%r\d+, )64(;\n\tmbarrier\.arrive\.expect_tx)"  # of each thread, for one box
FAULTS = {
    "none, several tiles": Planted(shape="several tiles", expected=""),
    "weights written under a product": Planted(
        shape="several tiles",
        expected=r"register under way: line \d+ \(\w+\.py.*: cvt\.rn\.bf16x2.*\n.*writes %r\d+, which belongs to wgmma",
        patches={(_Run, "softmax"): softmax_with_converted_weights, (_Run, "start_values"): start_values},
    ),
    "no wgmma.fence": Planted(
        shape="prefill",
        expected=r"missing wgmma\.fence: line \d+ \(matmul\.py.*\n.*no wgmma\.fence is before the first product",
        edit=changed(r"^\s*wgmma\.fence[^;]*;", "//"),
    ),
    "one wgmma.fence, at the beginning": Planted(
        shape="prefill",
        expected=r"missing wgmma\.fence: line \d+ \(matmul\.py.*\n.*%r\d+, .* were written after the last wgmma\.fence",
        edit=lambda ptx: (
            changed(r"^\s*wgmma\.fence[^;]*;", "//")(ptx).replace(
                "\tmov.u32 \t%r1, %tid.x;", "\tmov.u32 \t%r1, %tid.x;\n\twgmma.fence.sync.aligned;"
            )
            if "paged_prefill" in ptx
            else ptx
        ),
    ),
    "a wait for the wrong group": Planted(
        shape="several tiles",
        expected=r"register under way: line \d+ .*\n.*reads %r\d+, which belongs to wgmma",
        edit=changed(r"(wgmma\.wait_group\.sync\.aligned) 0;", r"\1 1;"),
    ),
    "bytes of one box too many": Planted(
        shape="prefill",
        expected=r"deadlock: .*mbarrier\.try_wait.*\n.*0 of \d+ arrivals are missing, and 8192 expected bytes",
        edit=changed(EXPECT_KEYS, r"\g<1>128\2", count=1),
    ),
    "bytes of one box too few": Planted(
        shape="several tiles",
        expected=r"under way: line \d+ \(matmul\.py.*wgmma.*\n.*written by the mbarrier at 0x\w+ at line \d+",
        edit=changed(EXPECT_KEYS, r"\g<1>0\2", count=1),
    ),
    "a store under the wrong swizzle": Planted(
        shape="prefill",
        expected=r"off by .* as under another swizzle; it is written by .*paged_prefill \(prefill_\w+\.py:\d+\) line",
        patches={(TensorMap, "encoded"): output_without_swizzle},
    ),
    "no fence.proxy.async": Planted(
        shape="several tiles",
        expected=r"proxy: line \d+ \(prefill_hopper\.py.*cp\.async\.bulk\.tensor.*\n.*without a fence\.proxy\.async",
        edit=changed(r"^\s*fence\.proxy\.async[^;]*;", "//"),
    ),
    "more registers than there are": Planted(
        shape="prefill",
        expected=r"deadlock: line .*\n.* waits for 232 registers for each thread",
        edit=changed(r"(setmaxnreg\.inc\S*) 224;", r"\1 232;"),
    ),
}
