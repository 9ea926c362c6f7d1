"""Packs a step plan into one padded buffer, with the patches that update the slots' state."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import numpy as np

from batcher.grammar import num_mask_words
from batcher.sampling_table import PARAMETERS
from batcher.scheduling.request_state import RequestState
from batcher.scheduling.step_plan import StepPlan
from batcher.slots import SlotLayout
from batcher.step import MASK_BLOCK, PATCH_BLOCK, Bucket, Capacity, PackedLayout, PenaltyReset, StepInput

_UNKNOWN = np.iinfo(np.int64).min  # no i32 equals it, so every value is sent the first time
_FLOAT, _BITS = Struct("<f"), Struct("<i")


class Packer:
    """Keeps a copy of the device's slot state, and sends only the values that differ.

    The device itself changes two columns, LAST_TOKEN and KV_LEN. LAST_TOKEN is never sent: a request decodes only after
    one of its own steps has emitted a token. KV_LEN is sent at every admission. ADAPTER is an adapter slot, so it may
    stay the same where the adapter in that slot is another one.
    """

    def __init__(self, capacity: Capacity, num_slots: int) -> None:
        self._page_size = capacity.page_size
        self._pad_slot = capacity.num_slots
        self._num_mask_words = num_mask_words(capacity.vocab_size)
        self._width = SlotLayout.width(capacity.pages_per_seq)
        self._pad_index = capacity.num_slots * self._width
        self._mirror = np.full((num_slots, self._width), _UNKNOWN, np.int64)
        self._sections: dict[Bucket, tuple[int, dict[str, slice], int]] = {}

    def forget(self) -> None:
        """Forgets the copy of the slot state, because the device has lost its state. Every value will be sent again."""
        self._mirror.fill(_UNKNOWN)

    def pack(self, plan: StepPlan) -> StepInput:
        """Packs the plan into the arrays that the runner takes."""
        size, sections, num_patches = self._layout(plan.bucket)
        packed = np.zeros(size, np.int32)
        num_rows = len(plan.rows)
        packed[0:4] = (plan.num_singles, num_rows, plan.num_tokens, plan.looks_up)
        slots = packed[sections["slots"]]
        slots[:num_rows] = plan.slots
        slots[num_rows:] = self._pad_slot
        packed[sections["q_lens"]][:num_rows] = 1 if plan.num_tokens == num_rows else plan.q_lens
        packed[sections["emits"]][:num_rows] = plan.emits if plan.chunks else 1
        self._pack_tokens(plan, packed, sections)
        patches = self._patches(plan)
        over = max(patches.shape[1] - num_patches, 0)  # what does not fit into the step's own buffer goes before it
        blocks = [
            self._padded(patches[:, start : min(start + PATCH_BLOCK, over)], PATCH_BLOCK)
            for start in range(0, over, PATCH_BLOCK)
        ]
        own = self._padded(patches[:, over:], num_patches)
        packed[sections["patch_indices"]], packed[sections["patch_values"]] = own
        resets = [
            PenaltyReset(slot=seq.slot, prompt=seq.prompt, output=np.array(seq.output, np.int32))
            for seq in plan.admitted
            if seq.has_penalties
        ]
        allowed = [(seq, seq.allowed) for seq in plan.admitted if seq.allowed is not None and seq.matcher is None]
        masks = self._mask_blocks([*plan.masks, *allowed]) if plan.masks or allowed else ()
        return StepInput(
            bucket=plan.bucket,
            packed=packed,
            patches=tuple(blocks),
            penalty_resets=tuple(resets),
            masks=masks,
            adapters=tuple(plan.adapters),
            model=plan.model,
        )

    def _pack_tokens(self, plan: StepPlan, packed: np.ndarray, sections: dict[str, slice]) -> None:
        tokens = packed[sections["tokens"]]
        tokens[: plan.num_tokens] = -1
        scoring = plan.bucket.variant.scores
        if scoring:
            targets = packed[sections["targets"]]
            targets[:] = -1
        for chunk in plan.chunks:
            seq = plan.rows[chunk.row]
            stop = chunk.start + chunk.count
            tokens[chunk.offset : chunk.offset + chunk.count] = seq.to_compute[chunk.start : stop]
            if scoring and seq.wants_prompt_logprobs:
                wanted = seq.prompt[chunk.start + 1 : stop + 1]
                targets[chunk.offset : chunk.offset + len(wanted)] = wanted

    def _patches(self, plan: StepPlan) -> np.ndarray:
        """i64[2, n]: flat indices and values. No index repeats: a scatter with repeated indices has no order."""
        indices, values = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        if plan.grown:
            first = SlotLayout.PAGE_TABLE
            indices.append(np.array([seq.slot * self._width + first + page for seq, page in plan.grown]))
            values.append(np.array([seq.pages[page] for seq, page in plan.grown]))
            self._mirror.reshape(-1)[indices[-1]] = values[-1]
        for seq in plan.admitted:
            columns, wanted = slot_state(seq, self._page_size)
            row = self._mirror[seq.slot]
            changed = row[columns] != wanted
            columns, wanted = columns[changed], wanted[changed]
            row[columns] = wanted
            row[SlotLayout.KV_LEN] = _UNKNOWN
            indices.append(seq.slot * self._width + columns)
            values.append(wanted)
        return np.stack([np.concatenate(indices), np.concatenate(values)])

    def _padded(self, patches: np.ndarray, size: int) -> np.ndarray:
        """i32[2, size]: the patches, and then patches of the pad index."""
        padded = np.zeros((2, size), np.int32)
        padded[0] = self._pad_index
        padded[:, : patches.shape[1]] = patches
        return padded

    def _mask_blocks(self, masks: list[tuple[RequestState, np.ndarray]]) -> tuple[np.ndarray, ...]:
        blocks = []
        for start in range(0, len(masks), MASK_BLOCK):
            block = np.zeros((MASK_BLOCK, 1 + self._num_mask_words), np.int32)
            block[:, 0] = self._pad_slot
            for row, (seq, mask) in enumerate(masks[start : start + MASK_BLOCK]):
                block[row, 0] = seq.slot
                block[row, 1:] = mask
            blocks.append(block)
        return tuple(blocks)

    def _layout(self, bucket: Bucket) -> tuple[int, dict[str, slice], int]:
        if bucket not in self._sections:
            layout = PackedLayout(bucket)
            self._sections[bucket] = (layout.size, layout.sections(), layout.num_patches)
        return self._sections[bucket]


def slot_state(seq: RequestState, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(columns i64[n], values i64[n]) of a request's slot state at admission, without LAST_TOKEN.

    A list is sent without padding: the rest of its columns is never read.
    """
    columns, values = [SlotLayout.KV_LEN, SlotLayout.ADAPTER], [seq.num_hit_pages * page_size, seq.adapter_slot]
    for parameter_values, places in _PLACES:
        for (start, bits), value in zip(places, parameter_values(seq), strict=True):
            if isinstance(value, (int, float)):
                columns.append(start)
                values.append(bits(value))
            elif value:
                columns += range(start, start + len(value))
                values += map(bits, value)
    table = SlotLayout.PAGE_TABLE + np.arange(len(seq.pages))
    return np.concatenate([np.array(columns), table]), np.concatenate([np.array(values), np.array(seq.pages, np.int64)])


def _float_bits(value: float) -> int:
    bits: int = _BITS.unpack(_FLOAT.pack(value))[0]
    return bits


def _signed(value: float) -> int:
    return int(value) - (int(value) >> 31 << 32)  # of 32 bits


_BITS_OF: dict[str, Callable[[float], int]] = {"float32": _float_bits, "uint32": _signed, "int32": int, "bool": int}
# Of each parameter with columns: its values, and the first column and the bits of each.
_PLACES = [
    (parameter.values, [(SlotLayout.at(column.name), _BITS_OF[column.dtype]) for column in parameter.columns])
    for parameter in PARAMETERS.values()
    if parameter.columns
]
