"""The static account of the TPU kernels by hand: what is read from the compiler's dumps, and how a batch is walked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.lab.accounts.bundles import Loop, Vmem, read_loops, read_vmem
from scripts.lab.accounts.glue import layer_cycles
from scripts.lab.accounts.targets import tpu_target
from scripts.lab.accounts.tpu_static import Compiled, OurDecode, OurFew, OurMixed, Row, Shipped

TARGET = tpu_target("v6e:1x1")
DUMP = """
     0   :  { %1 = vld [vmem:[#allocation1]] }
   0x1 LB: > { %2 = dma.hbm_to_vmem }
   0x2 LB: >> { %3 = vmatmul.bf16 ;; %4 = vst [#allocation9_spill] }
   0x3   : > { %8 = sld }
   0x4   : >> { %5 = vmatmul.bf16 }
   0x5   : > { %6 = vadd }
   0x6   :  { %7 = vadd }
"""


def test_loops(tmp_path: Path) -> None:
    """The inner loop goes on behind a bundle that is printed at the depth outside it."""
    path = tmp_path / "final_bundles.txt"
    path.write_text(DUMP)
    outer, inner = read_loops(path)
    assert (outer.depth, outer.begin, outer.bundles, outer.matmuls, outer.copies) == (1, 1, 5, 2, 1)
    assert (inner.depth, inner.begin, inner.bundles, inner.matmuls, inner.spills) == (2, 2, 2, 2, 1)
    assert (outer.arithmetic, inner.arithmetic) == (3, 2)
    assert not inner.moves
    assert Loop(depth=1, begin=0, bundles=33).moves
    assert inner.inside(outer)
    assert not outer.inside(inner)


def test_vmem(tmp_path: Path) -> None:
    report = {
        "global_info": {"vmem_capacity": 100},
        "hlo_breakdowns": {
            "kernel.1": {"total_size": 50, "blocks": [{"allocations": [{"size": 40}, {"size": 10, "tag": "SPILL"}]}]}
        },
    }
    (tmp_path / "1-vmem_report.html").write_text(f"<script>const DATA ={json.dumps(report)};</script>")
    assert read_vmem(tmp_path) == {"kernel.1": Vmem(capacity=100, used=50, spilled=10)}


PROGRAM = """
%fused (x: f32[8]) -> f32[8] {
  ROOT %convolution.1 = f32[8] convolution(%x), backend_config={"estimated_cycles":"7"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %early = f32[8] copy(%x), backend_config={"estimated_cycles":"1000"}
  %paged_attention_decode.1 = f32[8] custom-call(%early)
  %paged_attention_mixed.1 = f32[8] custom-call(%paged_attention_decode.1)
  %fusion.1 = f32[8] fusion(%paged_attention_mixed.1), calls=%fused, backend_config={"estimated_cycles":"50"}
  %copy.1 = f32[8] copy(%fusion.1), backend_config={"estimated_cycles":"30"}
  %slice-start = f32[8] slice-start(%copy.1)
  %paged_attention_decode.2 = f32[8] custom-call(%copy.1)
  %copy.2 = f32[8] copy(%paged_attention_decode.2), backend_config={"estimated_cycles":"4"}
  %paged_attention_mixed.2 = f32[8] custom-call(%copy.2)
  ROOT %late = f32[8] copy(%paged_attention_mixed.2), backend_config={"estimated_cycles":"1000"}
}
"""


def test_a_layer_is_what_lies_between_two_attentions() -> None:
    layer = layer_cycles(PROGRAM)
    assert (layer.products, layer.glue) == (50, 30 + 4)


def test_one_layer_has_no_next_attention() -> None:
    with pytest.raises(ValueError, match="at least two layers"):
        layer_cycles(PROGRAM.replace("%paged_attention_mixed.2 =", "%other ="))


def compiled(*loops: Loop) -> Compiled:
    for loop in loops:
        loop.arithmetic = 1
    return Compiled(loops=list(loops), vmem=Vmem(capacity=1, used=0, spilled=0))


def test_a_decode_s_items_fill_turns() -> None:
    """A turn of 100 bundles, 10 of them in the loop that starts one page's copy."""
    loops = compiled(Loop(depth=1, begin=0, bundles=100, matmuls=8), Loop(depth=2, begin=5, bundles=10, copies=1))
    kernel = OurDecode(TARGET, "8b", (256, 2), loops)
    assert kernel.iteration().bundles == 90 + 10 * 4
    # Blocks of 256, 44 and 100 tokens: two turns, of 3 pages and of 1.
    estimate = kernel.estimate([Row(1, 300), Row(1, 100), Row(64, 64)])
    assert estimate.bundles == (90 + 30) + (90 + 10)
    assert round(estimate.dma_cycles) == round(400 * 4096 / TARGET.chip.memory_bytes_per_cycle)


def mixed_loops(before: list[int], turns: list[int], after: list[int]) -> Compiled:
    """The loops inside an outermost one of 10,000 bundles: one that starts a page's copy, of 20, and those given."""
    entry = Loop(depth=1, begin=0, bundles=10_000, matmuls=8)
    inner = [Loop(depth=2, begin=5, bundles=20, copies=1)]
    for bundles, matmuls in [(n, 0) for n in before] + [(n, 8) for n in turns] + [(n, 0) for n in after]:
        inner.append(Loop(depth=2, begin=inner[-1].begin + inner[-1].bundles, bundles=bundles, matmuls=matmuls))
    return compiled(entry, *inner)


def test_units_beyond_the_diagonal_are_not_walked() -> None:
    loops = mixed_loops([30, 9, 5, 2, 7], [500], [50])
    loops.loops.append(Loop(depth=2, begin=900, bundles=33))  # moves an operand in VMEM, which does not count
    kernel = OurMixed(TARGET, "8b", (256, 512, 1024, 256, 4), loops)
    assert kernel.iteration().queries * 8 == 4 * 256  # four units, each a tile of one of eight planes
    estimate = kernel.estimate([Row(512, 512), Row(1, 900)])
    # The first 256 queries see one tile of tokens, the others two: 3 tiles x 8 planes in turns of four.
    assert estimate.pairs == 3 * 256 * 256
    assert estimate.inner_bundles == 6 * 500
    once = 10_000 - 20 - (30 + 9 + 5 + 2 + 7) - 500 - 50 - 33
    entries = 2 * once + 20 * (2 + 4)
    assert estimate.bundles == entries + 6 * 500 + 2 * (16 * (30 + 5 + 2) + 2 * 9 + 8 * 50)


def test_blocks_of_spec_decode_take_narrow_tiles() -> None:
    """64 queries: one tile. 65 take a wide one. 300 tokens end inside a tile of 256: dead words of 16 planes."""
    loops = mixed_loops([10, 3, 30, 9, 5, 2, 7], [100, 500], [20, 50])
    kernel = OurMixed(TARGET, "8b", (256, 512, 1024, 256, 4), loops)
    once = 10_000 - 20 - sum([10, 3, 30, 9, 5, 2, 7]) - 600 - 70
    narrow, wide = kernel.estimate([Row(64, 300)]), kernel.estimate([Row(65, 300)])
    shared = once + 20 * 3 + 16 * 7
    assert narrow.inner_bundles == 100  # 2 tiles of tokens x 8 planes in one turn of 16
    assert narrow.bundles == shared + 100 + 4 * (10 + 5 + 2) + 2 * 3 + 8 * 20
    assert wide.inner_bundles == 4 * 500
    assert wide.bundles == shared + 4 * 500 + 5 * (30 + 5 + 2) + 2 * 9 + 8 * 50


def test_rows_of_spec_decode_are_walked_in_chunks() -> None:
    """9 queries take three chunks of 4 slots, and 1,100 tokens three tiles of 512, of which the last is not full."""
    loops = compiled(
        Loop(depth=1, begin=0, bundles=5000, matmuls=8),
        Loop(depth=2, begin=10, bundles=20, copies=1),
        Loop(depth=2, begin=40, bundles=30),
        Loop(depth=2, begin=80, bundles=7),
        Loop(depth=2, begin=100, bundles=510, matmuls=8),
        Loop(depth=3, begin=105, bundles=500, matmuls=8),
        Loop(depth=2, begin=700, bundles=50),
    )
    estimate = OurFew(TARGET, "8b", (32, 2048, 512, 4), loops).estimate([Row(9, 1100), Row(1, 50)])
    assert estimate.inner_bundles == 3 * 3 * 500
    once = 5000 - 20 - 30 - 7 - 510 - 50
    assert estimate.bundles == once + 20 * 9 + 3 * 3 * 500 + 3 * (30 + 50) + 3 * 10 + 16 * 7
    assert estimate.pairs == 3 * 4 * 3 * 512


def test_a_kernel_with_other_loops_is_refused() -> None:
    with pytest.raises(ValueError, match="not the loops of the mixed kernel"):
        OurMixed(TARGET, "8b", (256, 512, 1024, 256, 4), mixed_loops([30, 9, 5], [500], [50]))


def test_the_shipped_kernel_takes_every_block_and_pads_head_dim_64() -> None:
    loops = compiled(Loop(depth=1, begin=0, bundles=90, matmuls=1), Loop(depth=2, begin=1, bundles=80, matmuls=1))
    kernel = Shipped(TARGET, "1b", (2, 32), loops)
    estimate = kernel.estimate([Row(64, 512)])
    assert estimate.bundles == 2 * 2 * 80
    assert round(estimate.dma_cycles) == round(2 * 512 * 4096 / TARGET.chip.memory_bytes_per_cycle)
