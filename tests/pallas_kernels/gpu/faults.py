"""Kernels with a fault in their synchronisation or their masks, and what the harness sees of them.

`python -m tests.pallas_kernels.gpu.faults NAME` prints the findings of one: a fault may hang the interpreter, whose
threads nobody can stop, so that those that can are run in a process of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import (
    attention,
    combine,
    conversion,
    decode,
    matmul,
    prefill_hopper,
    prefill_memory,
    prefill_mma,
    prefill_tile,
    ring,
    tile_list,
)
from pallas_kernels.gpu.device import Gpu
from pallas_kernels.gpu.parts import MERGE_PARTS, Parts
from pallas_kernels.spec import AttentionSpec
from tests.pallas_kernels.dense import Row, make_case
from tests.pallas_kernels.gpu import interpreted
from tests.pallas_kernels.gpu.interpreted import (
    AMPERE,
    BLACKWELL,
    HOPPER,
    ONE_BLACKWELL,
    ONE_HOPPER,
    Findings,
    compiled_step,
)

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
# Two tiles for the only CTA of the warp-specialised kernel, four for two CTAs of the mma kernel.
TWO_TILES_EACH = [Row(query_len=128, kv_len=128)]
# What is wrong in every block is seen in one.
SHORT_PREFILL = [Row(query_len=24, kv_len=40)]


@dataclass(frozen=True)
class Fault:
    rows: list[Row]
    patches: dict[tuple[Any, str], Any]  # (module or class, attribute): what takes its place
    gpu: Gpu = HOPPER
    spec: AttentionSpec = SPEC
    parts: Parts | None = None  # how rows are cut, instead of the chip's own way


def findings(fault: Fault) -> Findings:
    """What the harness sees. A fault that stops the interpreter is seen as well."""
    compiled_step.cache_clear()
    decode_only = fault.rows in (DECODE, MANY_ITEMS)
    num_tokens = sum(row.query_len for row in fault.rows)
    case = make_case(fault.spec, fault.rows, num_tokens=num_tokens, num_rows=2, pages_per_seq=10)
    patches = [mock.patch.object(owner, name, new) for (owner, name), new in fault.patches.items()]
    try:
        for patch in patches:
            patch.start()
        return interpreted.run(case, fault.gpu, decode_only=decode_only, parts=fault.parts)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return Findings(stopped=str(error))
    finally:
        mock.patch.stopall()
        compiled_step.cache_clear()


def advance_without_waiting(self, i):
    plgpu.commit_smem()
    ahead = i + self.num_stages - 1
    self._prefetch(ahead, self._slot(ahead))
    return self._slot(i)


def wait_at_the_next_slots_barrier(self, i):
    plgpu.commit_smem()
    plgpu.barrier_wait(self.arrived.at[self._slot(i + 1)])
    ahead = i + self.num_stages - 1
    self._prefetch(ahead, self._slot(ahead))
    return self._slot(i)


def wait_after_the_next_copies(self, i):
    ahead = i + self.num_stages - 1
    self._prefetch(ahead, self._slot(ahead))
    ring.plgpu.wait_gmem_to_smem(0)
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


def of_the_heads_before(**fields):
    return following(**fields | {"kv_head": jnp.maximum(fields["kv_head"] - 1, 0)})


def parts_of_the_next_block(self, block):
    yield from parts(self, block + 1)


def without_the_last_part(output, kinds, **options):
    short = [replace(kind, merges=kind.merges.at[:, MERGE_PARTS].add(-1)) for kind in kinds]
    whole_combine(output, short, **options)


def of_one_kernel_only(output, kinds, **options):
    whole_combine(output, kinds[:1], **options)


def with_sums_of_the_other_kernel(output, kinds, **options):
    decodes, chunks = kinds
    whole_combine(output, [replace(decodes, merges=chunks.merges), replace(chunks, merges=decodes.merges)], **options)


def one_place_for_all_parts(*args, **options):
    found = prefill_tiles(*args, **options)
    return replace(found, tiles=found.tiles.at[:, tile_list.TILE_SHIFT].set(0))


def only_returned(tile, converted):
    del tile
    return converted


def to_the_end(self, kind, place, smem, slot, num_valid):
    convert_tile(self, kind, place, smem, slot, jnp.int32(self.body.sizes.block_kv))


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


def start_values_and_release(self, i, acc, weights):
    start_values(self, i, acc, weights)
    plgpu.barrier_arrive(self.refs.met.at[2 * self.slot(i) + 1])


def finish_values_only(self, i):
    values = self.refs.v_smem.at[self.slot(i)]
    acc = matmul.result(self.acc, interpret=self.body.interpret)
    read = partial(matmul.read_until_here, self.acc, values, interpret=self.body.interpret)
    pl.when(i >= self.tile.first_block)(read)
    return acc


def everything_visible(shape, tile, first_token, first_key, block_kv, layout):
    return causal_mask(shape, tile, first_token + 10_000, first_key, block_kv, layout)


def queries_of_later_tokens(q_ref, q_smem, shape, tile, first_token, barrier=None):
    load_queries(q_ref, q_smem, shape, tile, jnp.where(first_token == 0, 8, first_token), barrier)


whole_combine, prefill_tiles = combine.combine, attention.prefill_tiles
convert_tile = prefill_memory.ConvertingMemory.convert_tile
start_scores, start_values = prefill_hopper._Run.start_scores, prefill_hopper._Run.start_values
following = ring.Following
parts, causal_mask, load_queries = ring.Source.parts, prefill_tile.causal_mask, prefill_tile.load_queries


def replaced_in(module: Any, name: str, replacement: Callable) -> dict[tuple[Any, str], Any]:
    """One module of the kernels with another `plgpu.<name>`; the others keep their own."""
    return {(module, "plgpu"): SimpleNamespace(**vars(plgpu) | {name: replacement})}


def without_fences_in(module: Any) -> dict[tuple[Any, str], Any]:
    return replaced_in(module, "commit_smem", lambda: None)


def without_waits_for_the_queries_place() -> dict[tuple[Any, str], Any]:
    """The warp-specialised kernel loads a tile's queries whether or not those of the tile before are still read."""
    ignored: list[object] = []
    original = prefill_memory.Memory.__init__

    def init(self, *args):
        original(self, *args)
        ignored.append(self.q_free)

    def wait(ref: object) -> None:
        if not any(ref is other for other in ignored):
            plgpu.barrier_wait(ref)

    return {(prefill_memory.Memory, "__init__"): init, **replaced_in(prefill_memory, "barrier_wait", wait)}


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
    "none, many items": Fault(MANY_ITEMS, {}, ONE_HOPPER, TWO_KV_HEADS),
    "none, cp.async": Fault(DECODE, {}, AMPERE),
    "none, prefill": Fault(PREFILL, {}),
    "none, prefill by mma": Fault(PREFILL, {}, BLACKWELL),
    "none, 8 bits": Fault(PREFILL, {}, spec=EIGHT_BIT),
    "none, in parts": Fault(PREFILL, {}, parts=IN_PARTS),
    "none, decode and prefill in parts": Fault(BOTH, {}, parts=IN_PARTS),
}
FAULTS = {
    "no wait": Fault(DECODE, {(ring.Ring, "advance"): advance_without_waiting}),
    "no wait, cp.async": Fault(DECODE, {(ring.Ring, "advance"): advance_without_waiting}, AMPERE),
    "waits for the next copies, too": Fault(DECODE, {(ring.Ring, "advance"): wait_after_the_next_copies}, AMPERE),
    "wrong block": Fault(DECODE, {(ring.Source, "parts"): parts_of_the_next_block}),
    "wrong block of the next item": Fault(
        MANY_ITEMS, {(decode, "Following"): of_the_heads_before}, ONE_HOPPER, TWO_KV_HEADS
    ),
    "part lost": Fault(DECODE, {(combine, "combine"): without_the_last_part}),
    "part of prefill lost": Fault(PREFILL, {(combine, "combine"): without_the_last_part}, BLACKWELL, parts=IN_PARTS),
    "parts of prefill not merged": Fault(BOTH, {(combine, "combine"): of_one_kernel_only}, parts=IN_PARTS),
    "parts of decode and prefill confused": Fault(
        BOTH, {(combine, "combine"): with_sums_of_the_other_kernel}, parts=IN_PARTS
    ),
    "parts at one place": Fault(
        PREFILL, {(attention, "prefill_tiles"): one_place_for_all_parts}, BLACKWELL, parts=IN_PARTS
    ),
    "no fence before a part": Fault(PREFILL, without_fences_in(prefill_hopper), parts=IN_PARTS),
    "no tail": Fault(SHORT_PREFILL, {(prefill_memory.CopyingMemory, "clear_tail"): no_tail}),
    "no mask": Fault(SHORT_PREFILL, {(prefill_tile, "causal_mask"): everything_visible}),
    "wrong queries": Fault(SHORT_PREFILL, {(prefill_tile, "load_queries"): queries_of_later_tokens}),
    "no fence": Fault(SHORT_PREFILL, without_fences_in(prefill_hopper)),
    "no fence in the ring": Fault(DECODE, without_fences_in(ring), ONE_HOPPER),
    "no fence between tiles": Fault(TWO_TILES_EACH, without_fences_in(prefill_mma), ONE_BLACKWELL),
    # In a run long enough to come round the ring: a tile of the mma kernel's.
    "refilled too early": Fault(
        PREFILL,
        {(ring.Ring, "fill"): fill_every_slot, (ring.Ring, "advance"): refill_the_slot_in_use},
        BLACKWELL,
    ),
    "keys released while they are multiplied": Fault(
        PREFILL,
        {
            (prefill_hopper._Run, "start_scores"): start_scores_and_release,
            (prefill_hopper._Run, "finish_scores"): finish_scores_only,
        },
    ),
    "values released while they are multiplied": Fault(
        PREFILL,
        {
            (prefill_hopper._Run, "start_values"): start_values_and_release,
            (prefill_hopper._Run, "finish_values"): finish_values_only,
        },
    ),
    "8 bits, no fence in the ring": Fault(DECODE, without_fences_in(ring), ONE_HOPPER, EIGHT_BIT),
    "8 bits, tiles not converted anew": Fault(DECODE, {(conversion, "convert"): only_returned}, spec=EIGHT_BIT),
    "8 bits, no fence": Fault(PREFILL, without_fences_in(prefill_memory), spec=EIGHT_BIT),
    "8 bits, no tail": Fault(
        SHORT_PREFILL, {(prefill_memory.ConvertingMemory, "convert_tile"): to_the_end}, spec=EIGHT_BIT
    ),
}
MAY_HANG = {
    # The copy that it waits for is issued after the wait.
    "wrong barrier": Fault(DECODE, {(ring.Ring, "advance"): wait_at_the_next_slots_barrier}),
    "slots counted anew in each item": Fault(
        MANY_ITEMS, {(ring.Ring, "_slot"): without_the_runs_before}, ONE_HOPPER, TWO_KV_HEADS
    ),
    "no wait for the queries' place": Fault(TWO_TILES_EACH, without_waits_for_the_queries_place(), ONE_HOPPER),
    **{f"no wait at {name}": Fault(PREFILL, without_waits_at(name)) for name in ("arrived", "met", "q_arrived")},
    "8 bits, no wait": Fault(PREFILL, without_waits_at("kv8_arrived"), spec=EIGHT_BIT),
}

if __name__ == "__main__":
    print(findings((NO_FAULT | FAULTS | MAY_HANG)[sys.argv[1]]))
