"""Kernels with a fault in their synchronisation or their masks, and what the harness sees of them.

`python -m tests.pallas_kernels.gpu.faults NAME` prints the findings of one: a fault may hang the interpreter, whose
threads nobody can stop, so that those that can are run in a process of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import (
    combine,
    conversion,
    matmul,
    prefill_hopper,
    prefill_memory,
    prefill_tile,
    ring,
)
from pallas_kernels.gpu.device import Gpu
from pallas_kernels.gpu.parts import MERGE_PARTS, Parts
from pallas_kernels.spec import AttentionSpec
from tests.pallas_kernels.dense import Row, make_case
from tests.pallas_kernels.gpu import interpreted

SPEC = AttentionSpec(
    num_query_heads=2, num_kv_heads=1, head_dim=64, page_size=64, dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16
)
TWO_KV_HEADS = replace(SPEC, num_kv_heads=2)
EIGHT_BIT = replace(SPEC, kv_dtype=jnp.float8_e4m3fn)
DECODE = [Row(query_len=1, kv_len=500), Row(query_len=1, kv_len=70)]
# Four items of three blocks for three CTAs.
MANY_ITEMS = [Row(query_len=1, kv_len=190), Row(query_len=1, kv_len=150)]
PREFILL = [Row(query_len=24, kv_len=600)]
BOTH = [Row(query_len=1, kv_len=500), Row(query_len=7, kv_len=600)]
IN_PARTS = Parts(max_parts=4, min_keys=128, max_slots=128)
# What is wrong in every block is seen in one.
SHORT_PREFILL = [Row(query_len=24, kv_len=40)]


@dataclass(frozen=True)
class Fault:
    rows: list[Row]
    patches: dict[tuple[Any, str], Any]  # (module or class, attribute): what takes its place
    gpu: Gpu = interpreted.HOPPER
    spec: AttentionSpec = SPEC
    parts: Parts | None = None  # how rows are cut, instead of the chip's own way


def findings(fault: Fault) -> interpreted.Findings:
    """What the harness sees. A fault that stops the interpreter is seen as well."""
    interpreted.compiled_step.cache_clear()
    decode_only = fault.rows in (DECODE, MANY_ITEMS)
    num_tokens = sum(row.query_len for row in fault.rows)
    case = make_case(fault.spec, fault.rows, num_tokens=num_tokens, num_rows=2, pages_per_seq=10)
    patches = [mock.patch.object(owner, name, new) for (owner, name), new in fault.patches.items()]
    try:
        for patch in patches:
            patch.start()
        return interpreted.run(case, fault.gpu, decode_only=decode_only, parts=fault.parts)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return interpreted.Findings(stopped=str(error))
    finally:
        mock.patch.stopall()
        interpreted.compiled_step.cache_clear()


def advance_without_waiting(self, i):
    plgpu.commit_smem()
    ahead = i + self.num_stages - 1
    self._prefetch(ahead, self._slot(ahead))
    return self._slot(i)


def refill_the_slot_in_use(self, i):
    slot = self._slot(i)
    plgpu.commit_smem()
    plgpu.barrier_wait(self.arrived.at[slot])
    self._prefetch(i + self.num_stages, slot)
    return slot


def fill_every_slot(self):
    for i in range(self.num_stages):
        self._prefetch(jnp.int32(i), i)


def without_the_runs_before(self, i):
    return lax.rem(jnp.int32(i), jnp.int32(self.num_stages))


def parts_of_the_next_block(self, block):
    yield from parts(self, block + 1)


def without_the_last_part(output, kinds, **options):
    short = [replace(kind, merges=kind.merges.at[:, MERGE_PARTS].add(-1)) for kind in kinds]
    whole_combine(output, short, **options)


def of_one_kernel_only(output, kinds, **options):
    whole_combine(output, kinds[:1], **options)


def only_returned(tile, converted):
    del tile
    return converted


def no_tail(self, num_valid, slot):
    pass


def start_scores_and_release(self, i):
    start_scores(self, i)
    plgpu.barrier_arrive(self.refs.met.at[2 * self.slot(i)])


def finish_scores_only(self, i):
    keys = self.refs.k_smem.at[self.slot(i)]
    scores = matmul.result(self.scores, interpret=self.body.interpret)
    matmul.read_until_here(self.scores, self.queries, keys, interpret=self.body.interpret)
    return scores


def everything_visible(shape, tile, first_token, first_key, block_kv, layout):
    return causal_mask(shape, tile, first_token + 10_000, first_key, block_kv, layout)


def queries_of_later_tokens(q_ref, q_smem, shape, tile, first_token, barrier=None):
    load_queries(q_ref, q_smem, shape, tile, jnp.where(first_token == 0, 8, first_token), barrier)


whole_combine, start_scores = combine.combine, prefill_hopper._Run.start_scores
parts, causal_mask, load_queries = ring.Source.parts, prefill_tile.causal_mask, prefill_tile.load_queries


def replaced_in(module: Any, name: str, replacement: Callable) -> dict[tuple[Any, str], Any]:
    """One module of the kernels with another `plgpu.<name>`; the others keep their own."""
    return {(module, "plgpu"): SimpleNamespace(**vars(plgpu) | {name: replacement})}


def without_fences_in(module: Any) -> dict[tuple[Any, str], Any]:
    return replaced_in(module, "commit_smem", lambda: None)


def without_waits_at(barrier: str) -> dict[tuple[Any, str], Any]:
    """Waits on one of the barriers of the warp-specialised kernel do nothing."""
    ignored: list[object] = []

    def remember(original: Callable) -> Callable:
        def init(self, body, refs, *args):
            original(self, body, refs, *args)
            ignored.append(getattr(refs, barrier))

        return init

    def base(ref: object) -> object:
        return getattr(ref, "ref", ref)

    def wait(ref: object) -> None:
        if not any(base(ref) is base(other) for other in ignored):
            plgpu.barrier_wait(ref)

    return {
        (prefill_hopper._Run, "__init__"): remember(prefill_hopper._Run.__init__),
        (prefill_memory.Memory, "__init__"): remember(prefill_memory.Memory.__init__),
        **replaced_in(prefill_hopper, "barrier_wait", wait),
        **replaced_in(prefill_memory, "barrier_wait", wait),
    }


NO_FAULT = {
    "none, decode": Fault(DECODE, {}),
    "none, cp.async": Fault(DECODE, {}, interpreted.AMPERE),
    "none, prefill": Fault(PREFILL, {}),
    "none, prefill by mma": Fault(PREFILL, {}, interpreted.BLACKWELL),
    "none, decode and prefill in parts": Fault(BOTH, {}, parts=IN_PARTS),
}
FAULTS = {
    "no wait": Fault(DECODE, {(ring.Ring, "advance"): advance_without_waiting}),
    "no wait, cp.async": Fault(DECODE, {(ring.Ring, "advance"): advance_without_waiting}, interpreted.AMPERE),
    "wrong block": Fault(DECODE, {(ring.Source, "parts"): parts_of_the_next_block}),
    "part lost": Fault(DECODE, {(combine, "combine"): without_the_last_part}),
    "parts of prefill not merged": Fault(BOTH, {(combine, "combine"): of_one_kernel_only}, parts=IN_PARTS),
    "no tail": Fault(SHORT_PREFILL, {(prefill_memory.CopyingMemory, "clear_tail"): no_tail}),
    "no mask": Fault(SHORT_PREFILL, {(prefill_tile, "causal_mask"): everything_visible}),
    "wrong queries": Fault(SHORT_PREFILL, {(prefill_tile, "load_queries"): queries_of_later_tokens}),
    "no fence": Fault(SHORT_PREFILL, without_fences_in(prefill_hopper)),
    "no fence in the ring": Fault(DECODE, without_fences_in(ring), interpreted.ONE_HOPPER),
    # In a run long enough to come round the ring: a tile of the mma kernel's.
    "refilled too early": Fault(
        PREFILL,
        {(ring.Ring, "fill"): fill_every_slot, (ring.Ring, "advance"): refill_the_slot_in_use},
        interpreted.BLACKWELL,
    ),
    "keys released while they are multiplied": Fault(
        PREFILL,
        {
            (prefill_hopper._Run, "start_scores"): start_scores_and_release,
            (prefill_hopper._Run, "finish_scores"): finish_scores_only,
        },
    ),
    "8 bits, tiles not converted anew": Fault(DECODE, {(conversion, "convert"): only_returned}, spec=EIGHT_BIT),
    "8 bits, no fence": Fault(PREFILL, without_fences_in(prefill_memory), spec=EIGHT_BIT),
}
MAY_HANG = {
    "slots counted anew in each item": Fault(
        MANY_ITEMS, {(ring.Ring, "_slot"): without_the_runs_before}, interpreted.ONE_HOPPER, TWO_KV_HEADS
    ),
    **{f"no wait at {name}": Fault(PREFILL, without_waits_at(name)) for name in ("arrived", "met", "q_arrived")},
}

if __name__ == "__main__":
    print(findings((NO_FAULT | FAULTS | MAY_HANG)[sys.argv[1]]))
