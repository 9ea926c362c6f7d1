"""Which LoRA adapter is in which adapter slot, which one comes next, and who waits for it.

An adapter is *resident* while a slot holds its weights. An adapter is *cold* if requests wait for it and it is not
resident. Requests have an order here: first by priority, then by arrival. Cold adapters have the order of the first
request that waits for each.

1. A request is admitted if its adapter is resident. It is also admitted if the weights of its cold adapter are staged
   and there is a slot for them: an empty one, or the least recently used one that may be replaced, preferably one whose
   adapter no request waits for. The step that admits it writes the weights into the slot.
2. A slot is never replaced while a running request, or a row of a step in flight, has its adapter. A preempted request
   keeps no slot.
3. The weights of the first `MAX_STAGED_ADAPTERS` cold adapters are staged. What is staged and no longer among these is
   unstaged.
4. Requests of resident adapters and of the base model pass those of cold adapters. When `MAX_PASSES` requests that come
   after a cold adapter's first one have been admitted, and it is one of those of rule 3, a slot is kept for it. It is
   the slot that is expected to be free soonest: with the fewest rows, and waiting requests that come before. No other
   adapter takes that slot, and the one in it admits no request that comes after the cold adapter's first one.

So no request waits for ever among those of its priority. Its adapter becomes one of the first cold ones, since those
before it get slots, and the rows of the slot that is then kept for it end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import nsmallest

from batcher.scheduling.request_state import RequestState
from batcher.step import MAX_STAGED_ADAPTERS, AdapterWrite

MAX_PASSES = 16  # more would make requests wait longer, and fewer would exchange adapters more often


def _place(seq: RequestState) -> tuple[int, int]:
    return seq.request.priority, seq.arrival


@dataclass(eq=False, slots=True)
class _Waiting:
    """The requests that wait for one adapter."""

    requests: list[RequestState] = field(default_factory=list)  # sorted by place
    num_passes: int = 0  # admissions of requests that come after the first of these, since the adapter is cold


class AdapterSlots:
    """See the module's docstring. The engine's thread calls everything."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._adapters = dict.fromkeys(range(1, max_loras + 1), 0)  # by slot, least recently used first; 0: empty
        self._slots: dict[int, int] = {}  # of the resident adapters
        self._rows: dict[int, int] = {}  # adapter -> its rows, those in flight included; none has 0
        self._adapter_of_row: dict[int, int] = {}  # by the slot of the request
        self._waiting: dict[int, _Waiting] = {}  # by adapter; none is empty
        self._staged: set[int] = set()
        self._staging: dict[int, bool] = {}  # adapters whose staging was asked for -> whether the device has kept it
        self._to_unstage: set[int] = set()
        self._writes: list[AdapterWrite] = []  # of the next step; until then these adapters are staged, too
        self.num_writes = 0
        # What follows from the above, as of the last `_refresh`.
        self._is_stale = False
        self._first_cold: list[int] = []
        self._kept: dict[int, int] = {}  # slot -> the cold adapter that it is kept for
        # Adapters with refused requests -> for which other adapter their slot was kept then; None: they had no slot.
        self._refused: dict[int, int | None] = {}

    @property
    def num_resident(self) -> int:
        """Adapters in slots."""
        return len(self._slots)

    @property
    def num_staged(self) -> int:
        """Adapters that are on the device, but in no slot yet."""
        return len(self._staged)

    def num_rows(self) -> dict[int, int]:
        """Adapter -> its rows, those in flight included."""
        return self._rows.copy()

    # --- requests ---

    def add(self, seq: RequestState) -> None:
        """The request waits."""
        if seq.request.adapter:
            waiting = self._waiting.setdefault(seq.request.adapter, _Waiting())
            insort(waiting.requests, seq, key=_place)
            self._is_stale = True

    def remove(self, seq: RequestState) -> None:
        """A waiting request waits no longer."""
        adapter = seq.request.adapter
        if adapter:
            requests = self._waiting[adapter].requests
            del requests[bisect_left(requests, _place(seq), key=_place)]
            if not requests:
                del self._waiting[adapter]
                self._refused.pop(adapter, None)
            self._is_stale = True

    def waiting_for(self, adapter: int) -> list[RequestState]:
        """The requests that wait for the adapter."""
        return self._waiting[adapter].requests.copy() if adapter in self._waiting else []

    def may_enter(self, seq: RequestState) -> bool:
        """Whether a waiting request may be admitted, as far as its adapter is concerned."""
        adapter = seq.request.adapter
        if not adapter:
            return True
        self._refresh()
        slot = self._slots.get(adapter)
        if slot is None:
            if self._can_be_written(adapter):
                return True
            self._refused[adapter] = None
            return False
        cold = self._kept.get(slot)
        if cold is None or _place(seq) < self._place_of(cold):
            return True
        self._refused[adapter] = cold
        return False

    def to_look_at_again(self) -> list[int]:
        """Adapters with refused requests that might be admitted now."""
        if not self._refused:
            return []
        self._refresh()
        adapters = [adapter for adapter, cold in self._refused.items() if self._has_changed(adapter, cold)]
        for adapter in adapters:
            del self._refused[adapter]
        return adapters

    def _has_changed(self, adapter: int, kept_for: int | None) -> bool:
        slot = self._slots.get(adapter)
        if slot is None:
            return self._can_be_written(adapter)
        return kept_for is None or self._kept.get(slot) != kept_for

    def enter(self, seq: RequestState) -> None:
        """A request has a row. If its adapter is not resident, the next step writes it into a slot."""
        adapter = seq.request.adapter
        if adapter:
            slot = self._slots.get(adapter) or self._write(adapter)
            self._use(slot)
            self._rows[adapter] = self._rows.get(adapter, 0) + 1
            self._adapter_of_row[seq.slot] = adapter
            seq.adapter_slot = slot
        for other, waiting in self._waiting.items():
            if other not in self._slots and _place(seq) > self._place_of(other):
                waiting.num_passes += 1
                if waiting.num_passes == MAX_PASSES:
                    self._is_stale = True

    def give_back(self, row: int) -> None:
        """The row is free: its request has left, and no step in flight has it."""
        adapter = self._adapter_of_row.pop(row, 0)
        if adapter:
            self._rows[adapter] -= 1
            if not self._rows[adapter]:
                del self._rows[adapter]
                self._use(self._slots[adapter])

    def take_writes(self) -> list[AdapterWrite]:
        """Those of the step that is planned now."""
        writes, self._writes = self._writes, []
        return writes

    @property
    def has_rows(self) -> bool:
        """Whether any row has an adapter."""
        return bool(self._rows)

    # --- staging ---

    def staging(self, *, may_stage: bool) -> tuple[list[int], list[int]]:
        """The adapters to unstage now, and those to stage after that. `staged` tells of each of these."""
        self._refresh()
        unwanted = self._staged.difference(self._first_cold)
        self._staged -= unwanted
        unstaged, self._to_unstage = sorted(self._to_unstage | unwanted), set()
        room = MAX_STAGED_ADAPTERS - len(self._staged) - len(self._staging) - len(self._writes)
        missing = [a for a in self._first_cold if a not in self._staged and a not in self._staging]
        asked = missing[: room if may_stage else 0]
        self._staging.update(dict.fromkeys(asked, True))
        return unstaged, asked

    def staged(self, adapter: int, *, is_there: bool) -> None:
        """An adapter has been staged, or could not be."""
        is_kept = self._staging.pop(adapter)
        if is_there:
            (self._staged if is_kept else self._to_unstage).add(adapter)

    @property
    def is_staging(self) -> bool:
        """Whether the result of a staging is still to come."""
        return bool(self._staging)

    def forget(self) -> None:
        """The device has lost its adapter slots, and perhaps what was staged. No request has a row."""
        assert not self._rows
        for write in self._writes.copy():
            self._take_back(write)
        self._slots.clear()
        self._adapters = dict.fromkeys(self._adapters, 0)
        self._to_unstage |= self._staged
        self._staged.clear()
        self._staging = dict.fromkeys(self._staging, False)
        self._is_stale = True

    # --- slots ---

    def _place_of(self, adapter: int) -> tuple[int, int]:
        return _place(self._waiting[adapter].requests[0])

    def _refresh(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        cold = [adapter for adapter in self._waiting if adapter not in self._slots]
        self._first_cold = nsmallest(MAX_STAGED_ADAPTERS, cold, key=self._place_of)
        self._kept = {}
        for adapter in self._first_cold:
            if self._waiting[adapter].num_passes >= MAX_PASSES:
                self._keep_slot_for(adapter)

    def _keep_slot_for(self, cold: int) -> None:
        """Rule 4."""
        place = self._place_of(cold)

        def num_before(slot: int) -> int:
            adapter = self._adapters[slot]
            requests = self._waiting[adapter].requests if adapter in self._waiting else []
            return self._rows.get(adapter, 0) + bisect_left(requests, place, key=_place)

        slots = [slot for slot in self._adapters if slot not in self._kept]
        if slots:
            self._kept[min(slots, key=num_before)] = cold

    def _can_be_written(self, cold: int) -> bool:
        return cold in self._staged and self._slot_for(cold) is not None

    def _slot_for(self, cold: int) -> int | None:
        """The slot that a cold adapter can take now."""
        slots = [
            slot
            for slot, adapter in self._adapters.items()
            if adapter not in self._rows and self._kept.get(slot, cold) == cold
        ]
        return min(slots, key=lambda slot: self._adapters[slot] in self._waiting, default=None)

    def _write(self, cold: int) -> int:
        slot = self._slot_for(cold)
        assert slot is not None and cold in self._staged, "the request may not enter"
        self._slots.pop(self._adapters[slot], None)
        for write in self._writes.copy():
            if write.slot == slot:
                self._take_back(write)
        self._adapters[slot], self._slots[cold] = cold, slot
        self._staged.remove(cold)
        self._writes.append(AdapterWrite(slot=slot, adapter=cold))
        self.num_writes += 1
        if cold in self._waiting:
            self._waiting[cold].num_passes = 0
        self._is_stale = True
        return slot

    def _take_back(self, write: AdapterWrite) -> None:
        """The request that it was for has left before any step: its row waited for pages."""
        self._writes.remove(write)
        self._staged.add(write.adapter)
        self.num_writes -= 1

    def _use(self, slot: int) -> None:
        self._adapters[slot] = self._adapters.pop(slot)

    def check_integrity(self, running: list[RequestState]) -> None:
        """Raises AssertionError if slots or rows are inconsistent."""
        assert sorted(self._adapters) == list(range(1, self._max_loras + 1))
        assert self._slots == {adapter: slot for slot, adapter in self._adapters.items() if adapter}
        of_rows = list(self._adapter_of_row.values())
        assert self._rows == {adapter: of_rows.count(adapter) for adapter in of_rows}
        assert self._rows.keys() <= self._slots.keys(), "an adapter with rows was replaced"
        for seq in running:
            assert self._adapter_of_row.get(seq.slot, 0) == seq.request.adapter
            assert self._slots.get(seq.request.adapter, 0) == seq.adapter_slot
        assert not self._staged & self._slots.keys() and not self._staged & self._staging.keys()
        assert len(self._staged) + len(self._staging) + len(self._writes) <= MAX_STAGED_ADAPTERS
        assert all(waiting.requests for waiting in self._waiting.values())
