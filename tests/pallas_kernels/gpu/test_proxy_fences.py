"""The reader of PTX that finds missing proxy fences, on programs of a few lines."""

from __future__ import annotations

import pytest

from tests.pallas_kernels.gpu.proxy_fences import unfenced_accesses

READ, WRITE = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}, [%r2];", "st.shared.b32 [%r2], %r1;"
FENCE, BARRIER = "fence.proxy.async.shared::cta;", "bar.sync 1, 128;"
LOAD = "@%p1 cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], [%r3];"
STORE = "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%rd1], [%r2];"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;"


@pytest.mark.parametrize("access", [READ, WRITE])
@pytest.mark.parametrize("copy", [LOAD, STORE, PRODUCT])
@pytest.mark.parametrize(
    ("between", "is_ordered"),
    [
        ([FENCE, BARRIER], True),
        ([BARRIER], False),
        ([FENCE], False),
        ([BARRIER, FENCE], False),
        ([FENCE, BARRIER, READ], False),
    ],
)
def test_a_fence_and_then_a_barrier_order_what_threads_did(access, copy, between, is_ordered):
    assert unfenced_accesses("\n".join([access, *between, copy, "ret;"])) == ([] if is_ordered else [copy])


def test_copies_before_any_access_and_waits_for_them_need_none():
    waiting = "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nmbarrier.try_wait.parity.shared.b64 P1, [%r1];"
    assert unfenced_accesses(f"{LOAD}\n{waiting}\n{READ}\n{waiting}\nret;") == []


@pytest.mark.parametrize("fences", [f"{FENCE}\n{BARRIER}\n", ""])
def test_a_loop_reaches_its_copy_with_what_it_read_the_turn_before(fences):
    loop = f"$L__BB0_1:\n{LOAD}\n{READ}\n{fences}@%p2 bra $L__BB0_1;\nret;"
    assert unfenced_accesses(loop) == ([] if fences else [LOAD])


def test_every_path_counts():
    """One of two paths has no fence; another warpgroup's path is not this thread's."""
    program = f"""
    @%p1 bra $L__BB0_1;
    {WRITE}
    @!%p2 bra $L__BB0_2;
    {FENCE}
    {BARRIER}
    bra.uni $L__BB0_2;
    $L__BB0_1:
    {LOAD}
    ret;
    $L__BB0_2:
    {STORE}
    ret;
    """
    assert unfenced_accesses(program) == [STORE]
