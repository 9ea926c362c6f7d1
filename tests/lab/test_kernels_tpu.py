"""The static account of the TPU kernels by hand: what is read from the compiler's dumps, and how a batch is walked."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.lab.accounts.bundles import Loop, Vmem, read_loops, read_vmem
from scripts.lab.accounts.glue import layer_cycles
from scripts.lab.accounts.targets import tpu_target
from scripts.lab.accounts.tpu_static import Compiled, OurDecode, Row

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
    assert round(estimate.dma_cycles) == round(400 * 4096 / TARGET.memory_bytes_per_cycle)
