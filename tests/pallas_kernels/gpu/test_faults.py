"""The test of the tests: a kernel with a fault in its synchronisation or its masks must not pass them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.api import AttentionSpec
from pallas_kernels.gpu import combine, prefill_hopper, prefill_tile, ring
from pallas_kernels.gpu.device import Gpu
from tests.pallas_kernels.dense import Row, make_case
from tests.pallas_kernels.gpu import interpreted
from tests.pallas_kernels.gpu.interpreted import BLACKWELL, HOPPER, Findings, compiled_step

SPEC = AttentionSpec(
    num_query_heads=2, num_kv_heads=1, head_dim=64, page_size=64, dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16
)
DECODE = [Row(query_len=1, kv_len=500), Row(query_len=1, kv_len=70)]
PREFILL = [Row(query_len=24, kv_len=600)]


def findings(rows: list[Row], gpu: Gpu = HOPPER) -> Findings:
    """What the harness sees. A fault that stops the interpreter is seen as well."""
    compiled_step.cache_clear()
    decode_only = rows is DECODE
    case = make_case(SPEC, rows, num_tokens=2 if decode_only else 24, num_rows=2, pages_per_seq=10)
    try:
        return interpreted.run(case, gpu, decode_only=decode_only)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return Findings(stopped=str(error))
    finally:
        compiled_step.cache_clear()


@pytest.mark.parametrize("rows", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_no_fault_no_findings(rows):
    assert findings(rows) == Findings()


def advance_without_waiting(self, i):
    ahead = i + self.num_stages - 1
    self._prefetch(ahead, lax.rem(ahead, jnp.int32(self.num_stages)))
    return lax.rem(i, jnp.int32(self.num_stages))


def refill_the_slot_in_use(self, i):
    slot = lax.rem(i, jnp.int32(self.num_stages))
    plgpu.barrier_wait(self.arrived.at[slot])
    self._prefetch(i + self.num_stages, slot)
    return slot


def fill_every_slot(self):
    for i in range(self.num_stages):
        self._prefetch(jnp.int32(i), i)


def parts_of_the_next_block(self, block):
    yield from parts(self, block + 1)


def without_the_last_part(output, partial, lse, row_items, **options):
    whole_combine(output, partial, lse, row_items.at[0, 1].add(-1), **options)


def no_tail(self, num_valid, slot):
    pass


def everything_visible(shape, tile, first_token, first_key, block_kv, layout):
    return causal_mask(shape, tile, first_token + 10_000, first_key, block_kv, layout)


def queries_of_later_tokens(q_ref, q_smem, shape, tile, first_token, barrier=None):
    load_queries(q_ref, q_smem, shape, tile, jnp.where(first_token == 0, 8, first_token), barrier)


whole_combine = combine.combine
parts, causal_mask, load_queries = ring.Source.parts, prefill_tile.causal_mask, prefill_tile.load_queries


@pytest.mark.parametrize(
    ("rows", "patches"),
    [
        (DECODE, {(ring.Ring, "advance"): advance_without_waiting}),
        (DECODE, {(ring.Source, "parts"): parts_of_the_next_block}),
        (DECODE, {(combine, "combine"): without_the_last_part}),
        (PREFILL, {(prefill_hopper._Memory, "clear_tail"): no_tail}),
        (PREFILL, {(prefill_tile, "causal_mask"): everything_visible}),
        (PREFILL, {(prefill_tile, "load_queries"): queries_of_later_tokens}),
    ],
    ids=["no wait", "wrong block", "part lost", "no tail", "no mask", "wrong queries"],
)
def test_a_fault_is_found(monkeypatch, rows: list[Row], patches: dict[tuple[object, str], Callable]):
    for (owner, name), replacement in patches.items():
        monkeypatch.setattr(owner, name, replacement)
    assert findings(rows) != Findings()


def test_a_slot_refilled_too_early_is_found(monkeypatch):
    """In a run long enough to come round the ring: a tile of the mma kernel's."""
    assert findings(PREFILL, BLACKWELL) == Findings()
    monkeypatch.setattr(ring.Ring, "fill", fill_every_slot)
    monkeypatch.setattr(ring.Ring, "advance", refill_the_slot_in_use)
    assert findings(PREFILL, BLACKWELL) != Findings()


@pytest.mark.parametrize("barrier", ["arrived", "met", "q_arrived"])
def test_a_missing_wait_of_prefill_is_found(monkeypatch, barrier):
    """Waits on one of the barriers of the warp-specialised kernel do nothing."""
    compute, memory = prefill_hopper._Compute.__init__, prefill_hopper._Memory.__init__
    ignored: list[object] = []

    def remember(original, position):
        def init(self, *args):
            original(self, *args)
            ignored.append(args[position][barrier])

        return init

    monkeypatch.setattr(prefill_hopper._Compute, "__init__", remember(compute, 3))
    monkeypatch.setattr(prefill_hopper._Memory, "__init__", remember(memory, 5))
    wait = plgpu.barrier_wait
    monkeypatch.setattr(
        prefill_hopper.plgpu,
        "barrier_wait",
        lambda ref: None if any(_base(ref) is _base(other) for other in ignored) else wait(ref),
    )
    assert findings(PREFILL) != Findings()


def _base(ref: object) -> object:
    return getattr(ref, "ref", ref)
