"""The machine that executes PTX, on kernels of a few lines whose results and hazards are known by hand."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.lab.ptx.machine import Launch, Schedule, run
from scripts.lab.ptx.memory import Array
from scripts.lab.ptx.parse import parse

KERNEL = """
.version 9.0
.target sm_80
.address_size 64
.visible .entry small(
	.param .u64 small_param_0,
	.param .u64 small_param_1
)
.maxntid 64, 1, 1
{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<20>;
	.reg .b64 %rd<9>;
	.shared .align 16 .b8 smem;
	ld.param.b64 %rd1, [small_param_0];
	ld.param.b64 %rd2, [small_param_1];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd3, %r1, 4;
	add.s64 %rd4, %rd1, %rd3;
	add.s64 %rd5, %rd2, %rd3;
	mov.b64 %rd6, smem;
	add.s64 %rd7, %rd6, %rd3;
	ld.global.b32 %r2, [%rd4];
	and.b32 %r3, %r1, 31;
	// the case
	%BODY
	st.global.b32 [%rd5], %r9;
	ret;
}
"""
LANES = np.arange(64, dtype=np.int64)
GIVEN = (LANES * 0x01030507 + 0x80) & 0xFFFFFFFF  # what %r2 has


def executed(body: str, schedule: Schedule) -> tuple[np.ndarray, list]:
    given = Array("given", GIVEN.astype(np.uint32), writable=False)
    out = Array("out", np.zeros(64, np.uint32), defined=False)
    kernel = parse(KERNEL.replace("%BODY", body))
    sizes = {"grid": (1, 1, 1), "block": (64, 1, 1), "shared_bytes": 512}
    hazards = run(Launch(kernel=kernel, arguments=[given, out], **sizes), schedule)
    return out.value.astype(np.int64), hazards


SIGNED = np.where(GIVEN < 1 << 31, GIVEN, GIVEN - (1 << 32))
RESULTS = {
    "bfe.u32 %r9, %r2, 3, 9;": GIVEN >> 3 & 511,
    "bfe.s32 %r9, %r2, 0, 8;": ((GIVEN & 255) ^ 128) - 128,
    "shr.s32 %r9, %r2, 40;": SIGNED >> 31,
    "mov.b32 %r4, 33; shl.b32 %r9, %r2, %r4;": 0 * LANES,
    "mul.hi.s32 %r9, %r2, 1717986919;": SIGNED * 1717986919 >> 32,
    "prmt.b32 %r9, %r2, %r1, 0x4012;": (LANES << 24 | (GIVEN & 255) << 16 | (GIVEN & 0xFF00) | GIVEN >> 16 & 255),
    "prmt.b32 %r9, %r2, %r1, 0x8888;": np.where(GIVEN & 128, 0xFFFFFFFF, 0),
    "cvt.u16.u32 %rs1, %r2; cvt.u32.u16 %r9, %rs1;": GIVEN & 0xFFFF,
    "cvt.s8.s32 %rs1, %r2; cvt.s32.s8 %r9, %rs1;": ((GIVEN & 255) ^ 128) - 128,
    "cvt.rn.f32.s32 %r4, %r1; cvt.rn.bf16x2.f32 %r9, %r4, 0f3F800000;": 0x3F80
    | (LANES.astype(np.float32).view(np.uint32).astype(np.int64) >> 16 << 16),
    "shfl.sync.bfly.b32 %r9, %r1, 5, 31, -1;": LANES ^ 5,
    "shfl.sync.idx.b32 %r9, %r1, 3, 0x181f, -1;": LANES // 8 * 8 + 3,
    # Three ways through a branch in a branch, which meet again before the shuffle.
    """setp.lt.s32 %p1, %r3, 10;
	mov.b32 %r4, 1;
	@%p1 bra $L__meet;
	mov.b32 %r4, 2;
	setp.lt.s32 %p2, %r3, 20;
	@!%p2 bra $L__inner;
	mov.b32 %r4, 3;
$L__inner:
	add.s32 %r4, %r4, 10;
$L__meet:
	shfl.sync.bfly.b32 %r9, %r4, 16, 31, -1;""": np.select([LANES % 32 < 10, LANES % 32 < 20], [1, 13], 12)[LANES ^ 16],
    # A loop whose lanes leave it one after the other.
    """mov.b32 %r9, 0;
$L__again:
	add.s32 %r9, %r9, 2;
	setp.lt.s32 %p1, %r9, %r3;
	@%p1 bra $L__again;""": np.maximum(-(-(LANES % 32) // 2) * 2, 2),
    # Warps exchange their values in shared memory.
    """st.shared.b32 [%rd7], %r1;
	bar.sync 0;
	xor.b32 %r4, %r1, 63;
	mul.wide.u32 %rd8, %r4, 4;
	add.s64 %rd8, %rd6, %rd8;
	ld.shared.b32 %r9, [%rd8];""": LANES ^ 63,
    """cp.async.ca.shared.global [%rd7], [%rd4], 4;
	cp.async.commit_group;
	cp.async.wait_group 0;
	ld.shared.b32 %r9, [%rd7];""": GIVEN,
}


@pytest.mark.parametrize("body", RESULTS)
@pytest.mark.parametrize("landing", ["late", "early", "random"])
def test_results(body: str, landing: str) -> None:
    found, hazards = executed(body, Schedule(seed=3, landing=landing))
    assert (found.tolist(), hazards) == ((RESULTS[body] & 0xFFFFFFFF).tolist(), [])


EXCHANGE = """xor.b32 %r4, %r1, 63;
	mul.wide.u32 %rd8, %r4, 4;
	add.s64 %rd8, %rd6, %rd8;
	ld.shared.b32 %r9, [%rd8];"""
ALIGNED = "mov.b32 %r9, 0; shl.b32 %r4, %r3, 4; cvt.u64.u32 %rd8, %r4; add.s64 %rd8, %rd6, %rd8;"
COPY = "cp.async.ca.shared.global [%rd7], [%rd4], 4; cp.async.commit_group;"
HAZARDS = {
    "add.s32 %r9, %r10, 1;": ("unwritten register", "%r10"),
    "ld.shared.b32 %r9, [%rd7];": ("unwritten memory", "shared memory at byte"),
    "ld.global.b32 %r9, [%rd4+4];": ("out of bounds", "given (uint32[64], 256 bytes) at byte 256"),
    "ld.global.b32 %r9, [%rd4+-4];": ("out of bounds", "at byte -4"),
    "mov.b32 %r9, 0; st.shared.b32 [%rd7+512], %r9;": ("out of bounds", "shared memory"),
    "ld.global.v2.b32 {%r9, %r4}, [%rd4];": ("misaligned", "reads 8 bytes of given at byte"),
    "mov.b32 %r9, 0; st.global.b32 [%rd4], %r9;": ("write to an input", "given"),
    "mov.b32 %r9, %r1; st.global.b32 [%rd2], %r9;": ("global race", "out at byte 0x0"),
    f"st.shared.b32 [%rd7], %r1; {EXCHANGE}": ("race", "without a barrier between"),
    f"{COPY} ld.shared.b32 %r9, [%rd7];": ("under way", "cp.async of warp"),
    f"{COPY} cp.async.wait_group 1; ld.shared.b32 %r9, [%rd7];": ("under way", "cp.async of warp"),
    f"{COPY} cp.async.wait_group 0; {EXCHANGE}": ("race", "warp"),  # the other warp has waited, and not met this one
    f"{COPY} mov.b32 %r9, 0;": ("never waited for", "a copy of warp"),
    "mov.b32 %r9, 0; setp.lt.s32 %p1, %r3, 7; @%p1 bar.sync 0;": ("divergence", "not all lanes"),
    "mov.b32 %r9, 0; setp.lt.s32 %p1, %r3, 7; @%p1 shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;": ("divergence", "reach"),
    "mov.b32 %r9, 0; setp.lt.s32 %p1, %r3, 7; @%p1 shfl.sync.bfly.b32 %r9, %r1, 8, 31, 127;": ("divergence", "reads"),
    "mov.b32 %r9, 0; setp.lt.s32 %p1, %r3, 7; @%p1 elect.sync %r4|%p2, -1;": ("divergence", "not all lanes"),
    f"{ALIGNED} setp.lt.s32 %p1, %r3, 7; @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r4}}, [%rd8];": (
        "divergence",
        "not all lanes",
    ),
    f"{ALIGNED} ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r4}}, [%rd8+8];": ("misaligned", "16 bytes of shared"),
    "mov.b32 %r9, 0; setp.lt.s32 %p1, %r1, 32; @%p1 bar.sync 1, 64;": ("deadlock", "barrier 1"),
    "mov.b32 %r9, 0; setp.lt.s32 %p1, %r1, 32; @%p1 bar.arrive 1, 96; @%p1 bar.arrive 1, 96;": ("barrier", "twice"),
    "mov.b32 %r9, 0; shr.u32 %r5, %r1, 5; shl.b32 %r5, %r5, 5; add.s32 %r5, %r5, 64;bar.arrive 1, %r5;": (
        "barrier",
        "threads, where another warp said",
    ),
    "mov.b32 %r9, 0; bar.sync 1, 48;": ("barrier", "48 threads are not whole warps"),
    "mov.b32 %r9, 0; $L__on: bra $L__on;": ("endless", "instructions"),
}


@pytest.mark.parametrize("body", HAZARDS)
def test_hazards(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.lab.ptx.machine.MAX_INSTRUCTIONS", 3000)
    kind, words = HAZARDS[body]
    _, hazards = executed(body, Schedule(landing="late"))
    assert any(hazard.kind == kind and words in hazard.message for hazard in hazards), "\n".join(map(str, hazards))


def test_the_seed_decides_the_order() -> None:
    """Which of two warps writes last, and what a copy under way has brought by then."""
    body = "mov.b32 %r9, %r1; st.global.b32 [%rd2+128], %r1;"
    found = {int(executed(body, Schedule(seed=seed))[0][32]) for seed in range(20)}
    assert len(found) > 1
    assert executed(body, Schedule(seed=5))[0].tolist() == executed(body, Schedule(seed=5))[0].tolist()
