"""Hopper's instructions as executed PTX, on kernels of a few lines: copies by TMA, mbarriers, wgmma."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from scripts.lab.ptx import host
from scripts.lab.ptx.isa import Address, Coordinates, Immediate, Label, Register, Sink, Special, Symbol, Vector
from scripts.lab.ptx.machine import Launch, Schedule, run
from scripts.lab.ptx.memory import Array
from scripts.lab.ptx.parse import ParseError, parse
from scripts.lab.ptx.tma import TensorMap

KERNEL = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry small(
	.param .u64 .ptr .align 256 out,
	.param .align 64 .b8 maps[256]
)
.maxntid 128, 1, 1
{
	.reg .pred %p<9>;
	.reg .b32 %r<40>;
	.reg .f32 %f<9>;
	.reg .b64 %rd<20>;
	.shared .align 16 .b8 smem;
	.file	1 "/somewhere/kernel.py"
	.loc	1 7 3
	%BODY
	ret;
}
"""
# Thread 0 makes an mbarrier, and copies boxes of two maps to shared memory.
LOAD = """
	mov.u32 %r1, %tid.x;
	setp.eq.b32 %p1, %r1, 0;
	mov.b64 %rd1, maps;
	cvta.param.u64 %rd2, %rd1;
	add.s64 %rd3, %rd2, 128;
	mov.b64 %rd4, smem;
	cvt.u32.u64 %r2, %rd4;
	add.s32 %r3, %r2, 4096;
	add.s32 %r4, %r2, 2048;
	mov.b32 %r5, 0;
	@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
	fence.mbarrier_init.release.cluster;
	bar.sync 0;
	@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], %BYTES;
	@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd2, {%r5, %r5}], [%r3];
	@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd3, {%r5, %r5}], [%r3];
"""
WAIT = """{
	.reg .pred P1;
	AGAIN:
	mbarrier.try_wait.parity.shared.b64 P1, [%r3], 0, 10000;
	@P1 bra.uni DONE;
	bra.uni AGAIN;
	DONE:
	}
"""
# Each thread reads 16 bytes of the first box's rows of 128.
READ = """
	mul.wide.u32 %rd6, %r1, 16;
	add.s64 %rd7, %rd4, %rd6;
	ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%rd7];
	ld.param::entry.b64 %rd8, [out];
	add.s64 %rd9, %rd8, %rd6;
	st.global.v4.b32 [%rd9], {%r10, %r11, %r12, %r13};
"""
# 64 x 16 by 16 x 8 of the swizzled boxes: rows of 128 bytes, groups of 8 rows 1024 bytes apart.
MULTIPLY = """
	shr.u32 %r20, %r2, 4;
	cvt.u64.u32 %rd10, %r20;
	or.b64 %rd10, %rd10, 0x4000004000010000;
	add.s64 %rd11, %rd10, %B_CHUNKS;
	mov.b32 %r30, 0f00000000;
	mov.b32 %r31, 0f00000000;
	mov.b32 %r32, 0f00000000;
	mov.b32 %r33, 0f00000000;
	wgmma.fence.sync.aligned;
	{ .reg .pred p; setp.ne.b32 p, 1, 0;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r30,%r31,%r32,%r33}, %rd10, %rd11, p, 1, 1, 0, 0; }
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	mul.wide.u32 %rd6, %r1, 16;
	ld.param::entry.b64 %rd8, [out];
	add.s64 %rd9, %rd8, %rd6;
	st.global.v4.b32 [%rd9], {%r30, %r31, %r32, %r33};
"""
DRAWN = np.random.default_rng(0).standard_normal((80, 64)).astype(ml_dtypes.bfloat16)
WAYS = [Schedule(seed=seed, landing=kind) for seed, kind in enumerate(("late", "early", "random", "random"))]


def executed(body: str, schedule: Schedule, boxes: tuple[int, int] = (16, 16)) -> tuple[np.ndarray, str]:
    """What the threads write, u8[128, 16], and the hazards. Boxes are rows of 64 values."""
    out = Array("out", np.zeros((128, 16), np.uint8), defined=False)
    given = Array("given", DRAWN, writable=False)
    maps = Array("maps", np.zeros(256, np.uint8))
    maps.inline = True
    maps.meta = {
        128 * i: TensorMap.encoded(given, 0, 7, (80, 64), (64, 1), (rows, 64), swizzle=128)
        for i, rows in enumerate(boxes)
    }
    kernel = parse(KERNEL.replace("%BODY", body.replace("%BYTES", str(128 * sum(boxes)))))
    sizes = {"grid": (1, 1, 1), "block": (128, 1, 1), "shared_bytes": 16384}
    hazards = run(Launch(kernel=kernel, arguments=[out, maps], **sizes), schedule)
    return out.value, "\n".join(map(str, hazards))


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_swizzles_rows_of_128_bytes(way):
    out, hazards = executed(LOAD + WAIT + READ, way)
    chunks = DRAWN[:16].view(np.uint8).reshape(16, 8, 16)
    expected = np.stack([[chunks[row, chunk ^ row % 8] for chunk in range(8)] for row in range(16)])
    assert (out.reshape(expected.shape) == expected).all() and not hazards


@pytest.mark.parametrize("way", WAYS)
def test_products_of_swizzled_operands(way):
    body = LOAD.replace("%r2, 4096", "%r2, 12288").replace("%r2, 2048", "%r2, 8192") + WAIT + MULTIPLY
    out, hazards = executed(body.replace("%B_CHUNKS", str(8192 // 16)), way, boxes=(64, 8))
    fragments = out.view(np.float32).reshape(4, 8, 4, 2, 2)  # warp, row, pair of columns, upper or lower rows, column
    expected = DRAWN[:64, :16].astype(np.float64) @ DRAWN[:8, :16].astype(np.float64).T
    found = fragments.transpose(0, 3, 1, 2, 4).reshape(64, 8)
    assert np.abs(found - expected).max() < 1e-5 and not hazards


# What the threads have written goes out to the second map's tensor.
STORE = """
	mov.b32 %r19, 0;
	st.shared.b32 [%rd7], %r19;
	fence.proxy.async.shared::cta;
	bar.sync 0;
	@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd3, {%r5, %r5}], [%r2];
	@%p1 cp.async.bulk.commit_group;
	st.shared.b32 [%rd7], %r19;
"""
ARRIVE = "@%p1 mbarrier.arrive.shared.b64 _, [%r3];"
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;"
UNDEFINED = {
    "no wait": (LOAD + READ, r"under way: .*ld\.shared.*\n.*written by the mbarrier at 0x\w+"),
    "bytes": (LOAD.replace("%BYTES", "8192") + WAIT + READ, r"deadlock: .*kernel\.py:7.*\n.* 4096 expected bytes"),
    "bytes of one box": (LOAD.replace("%BYTES", "2048") + WAIT + READ, "copy after its phase: .*bulk"),
    "arrivals": (LOAD.replace("[%r3], 1;", "[%r3], 2;") + WAIT + READ, r"deadlock: .*\n.*1 of 2 arrivals"),
    "no fence of the mbarrier": (
        LOAD.replace("fence.mbarrier_init.release.cluster;", "") + WAIT + READ, r"proxy: .*\n.*no fence after its"
    ),
    "a place behind the tensor": (
        LOAD.replace("mov.b32 %r5, 0;", "mov.b32 %r5, 72;") + WAIT + READ, r"out of bounds: .*\n.*\[72, 72"
    ),
    "a misaligned box": (LOAD.replace("%r2, 2048", "%r2, 2064") + WAIT + READ, r"misaligned: .*\n.*of 128"),
    "written before it is copied over": (
        "mov.b64 %rd15, smem; mov.b32 %r19, 0; st.shared.b32 [%rd15], %r19;" + LOAD + WAIT + READ,
        r"proxy: .*cp\.async\.bulk\.tensor.*\n.*without a fence\.proxy\.async",
    ),
    "no fence of registers": (
        LOAD + WAIT + MULTIPLY.replace("wgmma.fence.sync.aligned;", ""), r"missing wgmma\.fence: .*kernel\.py:7"
    ),
    "no wait for the product": (
        LOAD + WAIT + MULTIPLY.replace("wgmma.wait_group.sync.aligned 0;", ""),
        r"register under way: .*st\.global.*\n.*reads %r3",
    ),
    "a fragment that is read": (
        LOAD + WAIT + READ
        + MULTIPLY.replace("%rd10, %rd11, p, 1, 1, 0, 0", "{%r10,%r11,%r12,%r13}, %rd11, p, 1, 1, 0")
        .replace("wgmma.wait_group", "mov.b32 %r14, %r10; wgmma.wait_group"),
        r"register under way: .*mov\.b32 %r14, %r10\n.*reads %r10",
    ),
    "a descriptor within the swizzle": (
        LOAD + WAIT + MULTIPLY.replace("%rd11, %rd10, %B", "%rd11, %rd10, 8;//"), r"misaligned: .*\n.*swizzle 128"
    ),
    "registers": ("setmaxnreg.dec.sync.aligned.u32 100;", "setmaxnreg: .*\n.*100 registers are no"),
    "no mbarrier": (LOAD.replace(INIT, "") + WAIT, "mbarrier: .*\n.*there is no mbarrier at"),
    "an mbarrier made again": (LOAD.replace(INIT, INIT + INIT) + WAIT, "mbarrier: .*\n.*initialises .* again"),
    "one arrival more": (LOAD.replace("@%p1 cp", ARRIVE + "@%p1 cp", 1) + WAIT, "mbarrier: .*\n.*1 threads arrive at"),
    "bytes beyond the count": (LOAD.replace("%BYTES", "1048576"), "mbarrier: .*expect_tx.*\n.*beyond the range"),
    "a phase that nobody sees": (LOAD + ARRIVE * 2, "phase missed: .*arrive"),
    "coordinates of another rank": (
        LOAD.replace("{%r5, %r5}]", "{%r5, %r5, %r5}]") + WAIT, r"tensor map: .*\n.*3 coordinates of a map"
    ),
    "a descriptor for each lane": (
        LOAD + WAIT
        + MULTIPLY.replace("wgmma.fence", "cvt.u64.u32 %rd12, %r1; add.s64 %rd11, %rd11, %rd12; wgmma.fence"),
        "descriptor: .*wgmma.*\n.*different descriptors",
    ),
    "a product of a part of a warp": (
        LOAD + WAIT + MULTIPLY.replace("wgmma.mma", "@%p1 wgmma.mma"), r"divergence: .*wgmma\.mma.*\n.*not all lanes"
    ),
    "registers of a part of a warp": (LOAD + "@%p1 setmaxnreg.dec.sync.aligned.u32 104;", "divergence: .*setmaxnreg"),
    "written before it is multiplied": (
        LOAD + WAIT + "mov.b32 %r19, 0; @%p1 st.shared.b32 [%rd4], %r19; bar.sync 0;" + MULTIPLY,
        r"proxy: .*wgmma\.mma_async.*\n.*without a fence\.proxy\.async",
    ),
    "written while it goes out": (
        LOAD + WAIT + READ + STORE, r"under way: .*st\.shared.*\n.*read by cp\.async\.bulk of warp 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDEFINED)
def test_what_is_undefined_is_named(name):
    body, expected = UNDEFINED[name]
    reports = [executed(body.replace("%B_CHUNKS", "128"), way)[1] for way in WAYS[:2]]
    assert re.search(expected, "\n".join(reports)), reports


EMPTY = parse(KERNEL.replace("%BODY", ""))
PROGRAM = """
define i32 @small_mosaic_gpu(ptr %0, ptr %1, ptr %2) {
  %3 = load ptr, ptr %2, align 8
  %4 = getelementptr ptr, ptr %2, i32 1
  %5 = load ptr, ptr %4, align 8
  %6 = alloca [128 x i8], i64 1, align 64
  %7 = alloca [2 x i64], align 8
  store i64 80, ptr %7, align 4
  %8 = getelementptr i64, ptr %7, i32 1
  store i64 64, ptr %8, align 4
  %9 = alloca [2 x i64], align 8
  store i64 64, ptr %9, align 4
  %10 = getelementptr i64, ptr %9, i32 1
  store i64 1, ptr %10, align 4
  call void @mosaic_gpu_init_tma_desc(ptr %6, ptr %3, i64 7, i64 2, ptr %7, ptr %9, i64 %SWIZZLE, ptr %7)
  %11 = load [128 x i8], ptr %6, align 1
  %12 = alloca { ptr, [128 x i8] }, align 8
  %13 = alloca [2 x i64], align 8
  %14 = getelementptr { ptr, [128 x i8] }, ptr %12, i32 0, i32 0
  store ptr %5, ptr %14, align 8
  %15 = getelementptr i64, ptr %13, i32 0
  store ptr %14, ptr %15, align 8
  %16 = getelementptr { ptr, [128 x i8] }, ptr %12, i32 0, i32 1
  store [128 x i8] %11, ptr %16, align 1
  %17 = getelementptr i64, ptr %13, i32 1
  store ptr %16, ptr %17, align 8
  %18 = call i32 @mosaic_gpu_launch_kernel(ptr %0, i32 5, i32 1, i32 1, i32 0, i32 0, i32 0, i32 128, i32 1, i32 1, i32 4096, i32 0, ptr %1, ptr %13)
  ret i32 %18
}
"""  # noqa: E501


def test_the_host_s_program_is_run():
    first, second = Array("first", DRAWN), Array("second", np.zeros(3))
    call = host.run(PROGRAM.replace("%SWIZZLE", "128"), EMPTY, [first, second])
    assert (call.grid, call.cluster, call.block, call.shared_bytes) == ((5, 1, 1), (1, 1, 1), (128, 1, 1), 4096)
    out, maps = call.arguments
    made = maps.meta[0]
    assert out is second and made.array is first
    assert (made.sizes, made.strides, made.box, made.swizzle) == ((64, 80), (2, 128), (64, 80), 128)


def test_the_driver_refuses_a_box_wider_than_its_swizzle():
    with pytest.raises(ValueError, match="a box wider than its swizzle"):
        host.run(
            PROGRAM.replace("%SWIZZLE", "64"),
            parse(KERNEL.replace("%BODY", "")),
            [Array("first", DRAWN), Array("second", np.zeros(3))],
        )


OPERANDS = {
    "@!%p1 bra $L__BB0_1;": (Label("$L__BB0_1"),),
    "mov.b32 %r1, 0f3F800000;": ("%r1", Immediate(0x3F800000)),
    "mov.b64 %rd1, 0dBFF0000000000000;": ("%rd1", Immediate(0xBFF0000000000000)),
    "mov.b32 {%r1, _}, %rd1;": (("%r1", Sink()), "%rd1"),
    "st.shared.v2.b32 [%rd1+-16], {%r1, %r2};": (Address(Symbol("%rd1"), -16), ("%r1", "%r2")),
    "elect.sync %r1|%p1, -1;": (("%r1", "%p1"), Immediate(-1)),
    "mov.u32 %r1, %ctaid.x;": ("%r1", Special("%ctaid.x")),
    "mbarrier.arrive.shared.b64 _, [smem+8];": (Sink(), Address(Symbol("smem"), 8)),
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, 0}], [%r2];": (
        (Address(Symbol("%rd1"), 0), ("%r1", Immediate(0))),
        Address(Symbol("%r2"), 0),
    ),
}


@pytest.mark.parametrize("text", OPERANDS)
def test_operands(text):
    def named(operand):
        match operand:
            case Register(name=name):
                return name
            case Vector(parts=parts):
                return tuple(map(named, parts))
            case Coordinates(base=base, parts=parts):
                return named(base), tuple(map(named, parts))
            case Address(base=Register(name=name), offset=offset):
                return Address(Symbol(name), offset)
        return operand

    (ins,) = parse(KERNEL.replace("%BODY", f"$L__BB0_1:\n{text}")).instructions[:-1]
    assert tuple(map(named, ins.operands)) == OPERANDS[text]
    assert (ins.source, ins.negated, ins.line) == ("kernel.py:7", "@!" in text, 19)


def test_names_of_inline_assembly_are_its_own():
    kernel = parse(KERNEL.replace("%BODY", WAIT + WAIT))
    first, second = (ins for ins in kernel.instructions if ins.opcode.startswith("mbarrier"))
    assert first.operands[0] != second.operands[0]
    assert sorted(kernel.labels.values()) == [0, 3, 3, 6]


@pytest.mark.parametrize("text", ["add.s32 %r1, %r99, 1;", "mov.b32 %r1, [%rd1;", "ld.b32 %r1 %r2;"])
def test_what_is_not_understood_is_said_with_its_line(text):
    with pytest.raises(ParseError, match="line 18"):
        parse(KERNEL.replace("%BODY", text))
