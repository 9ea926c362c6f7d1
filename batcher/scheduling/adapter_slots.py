"""Which LoRA adapter is in which adapter slot, which adapter gets a slot next, and which requests wait for it.

An adapter is *resident* while a slot holds its weights. An adapter is *cold* if requests wait for it and it is not
resident. In this module, requests are ordered by priority, then by arrival. Cold adapters are ordered by the first
request that waits for each.

1. A request is admitted if its adapter is resident. It is also admitted if the weights of its cold adapter are staged
   and there is a slot for them: an empty one, or the least recently used one that may be replaced. Slots whose adapter
   no request waits for are preferred. The step that admits the request writes the weights into the slot.
2. A slot is never replaced while a running request, or a row of a step in flight, uses its adapter. A preempted request
   holds no slot.
3. The weights of the first `MAX_STAGED_ADAPTERS` cold adapters are staged. A staged adapter that is no longer one of
   these is unstaged.
4. Requests of resident adapters and of the base model pass requests of cold adapters. A slot is reserved for a cold
   adapter of rule 3 when `MAX_PASSES` requests that come after its first request have been admitted. It is the slot
   that is expected to be free soonest: it has the fewest rows and waiting requests that come before that request. No
   other adapter takes that slot, and its present adapter admits no request that comes after the cold adapter's first.

So no request waits forever behind others of its priority. The adapters before its own get slots, so its own becomes one
of the first cold adapters. A slot is then reserved for it, and the rows of that slot end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import nsmallest

from batcher.scheduling.request_state import RequestState
from batcher.scheduling.staging import Staging
from batcher.step import MAX_STAGED_ADAPTERS, AdapterWrite

MAX_PASSES = 16  # with more, requests would wait longer; with fewer, adapters would be exchanged more often


def _place(seq: RequestState) -> tuple[int, int]:
    return seq.request.priority, seq.arrival


@dataclass(eq=False, slots=True)
class _Waiting:
    """The requests that wait for one adapter."""

    requests: list[RequestState] = field(default_factory=list)  # sorted by place
    num_passes: int = 0  # admitted requests that come after the first of `requests`, since the adapter became cold


class AdapterSlots:
    """Assigns adapters to slots by the rules in the module's docstring. Only the engine's thread calls its methods."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._adapters = dict.fromkeys(range(1, max_loras + 1), 0)  # slot -> adapter, oldest use first; 0: empty
        self._slots: dict[int, int] = {}  # resident adapter -> slot
        self._rows: dict[int, int] = {}  # adapter -> number of its rows, also in flight; has no zeros
        self._adapter_of_row: dict[int, int] = {}  # request slot -> adapter
        self._waiting: dict[int, _Waiting] = {}  # adapter -> its waiting requests, at least one
        self._staging = Staging()
        self._writes: list[AdapterWrite] = []  # writes of the next step; these adapters stay staged until then
        self.num_writes = 0
        # These follow from the above; `_refresh` computes them.
        self._is_stale = False
        self._first_cold: list[int] = []
        self._kept: dict[int, int] = {}  # slot -> the cold adapter for which it is reserved
        # Adapter with refused requests -> the adapter for which its slot was reserved then; None: it had no slot.
        self._refused: dict[int, int | None] = {}

    @property
    def num_resident(self) -> int:
        """The number of adapters in slots."""
        return len(self._slots)

    @property
    def num_staged(self) -> int:
        """The number of adapters that are on the device, but in no slot yet."""
        return len(self._staging.there)

    def num_rows(self) -> dict[int, int]:
        """Adapter -> the number of its rows, including those in flight."""
        return self._rows.copy()

    # --- requests ---

    def add(self, seq: RequestState) -> None:
        """Adds a request that waits."""
        if seq.request.adapter:
            waiting = self._waiting.setdefault(seq.request.adapter, _Waiting())
            insort(waiting.requests, seq, key=_place)
            self._is_stale = True

    def remove(self, seq: RequestState) -> None:
        """Removes a request that waits no longer."""
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
        """Whether the rules of adapters allow a waiting request to be admitted."""
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
        """The adapters whose refused requests might be admitted now."""
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
        """Gives an admitted request its adapter slot. If the adapter is not resident, the next step writes it there."""
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
        """Releases the adapter of a row whose request has left. No step in flight may have the row."""
        adapter = self._adapter_of_row.pop(row, 0)
        if adapter:
            self._rows[adapter] -= 1
            if not self._rows[adapter]:
                del self._rows[adapter]
                self._use(self._slots[adapter])

    def take_writes(self) -> list[AdapterWrite]:
        """The adapter writes of the step that is planned now."""
        writes, self._writes = self._writes, []
        return writes

    @property
    def has_rows(self) -> bool:
        """Whether any row has an adapter."""
        return bool(self._rows)

    # --- staging ---

    def staging(self, *, may_stage: bool) -> tuple[list[int], list[int]]:
        """The adapters to unstage now, and the adapters to stage after that. Call `staged` with the result of each."""
        self._refresh()
        staging = self._staging
        staging.drop(staging.there.difference(self._first_cold))
        room = MAX_STAGED_ADAPTERS - len(staging.there) - len(staging.coming) - len(self._writes)
        missing = [a for a in self._first_cold if a not in staging.there and a not in staging.coming]
        asked = missing[: room if may_stage else 0]
        staging.ask(asked)
        return staging.take_drops(), asked

    def staged(self, adapter: int, *, is_there: bool, seconds: float = 0.0) -> None:
        """Records the result of a staging. `is_there`: the adapter's weights are on the device."""
        self._staging.came(adapter, is_there=is_there)

    @property
    def is_staging(self) -> bool:
        """Whether the result of a staging is pending."""
        return bool(self._staging.coming)

    def forget(self) -> None:
        """Empties all slots, because the device has lost them. Staged adapters are to be unstaged. No request may have
        a row."""
        assert not self._rows
        for write in self._writes.copy():
            self._take_back(write)
        self._slots.clear()
        self._adapters = dict.fromkeys(self._adapters, 0)
        self._staging.forget()
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
        """Reserves a slot for a cold adapter by rule 4."""
        place = self._place_of(cold)

        def num_before(slot: int) -> int:
            adapter = self._adapters[slot]
            requests = self._waiting[adapter].requests if adapter in self._waiting else []
            return self._rows.get(adapter, 0) + bisect_left(requests, place, key=_place)

        slots = [slot for slot in self._adapters if slot not in self._kept]
        if slots:
            self._kept[min(slots, key=num_before)] = cold

    def _can_be_written(self, cold: int) -> bool:
        return cold in self._staging.there and self._slot_for(cold) is not None

    def _slot_for(self, cold: int) -> int | None:
        """The slot that a cold adapter can take now; None: there is none."""
        slots = [
            slot
            for slot, adapter in self._adapters.items()
            if adapter not in self._rows and self._kept.get(slot, cold) == cold
        ]
        return min(slots, key=lambda slot: self._adapters[slot] in self._waiting, default=None)

    def _write(self, cold: int) -> int:
        slot = self._slot_for(cold)
        assert slot is not None and cold in self._staging.there, "the request may not enter"
        self._slots.pop(self._adapters[slot], None)
        for write in self._writes.copy():
            if write.slot == slot:
                self._take_back(write)
        self._adapters[slot], self._slots[cold] = cold, slot
        self._staging.there.remove(cold)
        self._writes.append(AdapterWrite(slot=slot, adapter=cold))
        self.num_writes += 1
        if cold in self._waiting:
            self._waiting[cold].num_passes = 0
        self._is_stale = True
        return slot

    def _take_back(self, write: AdapterWrite) -> None:
        """Cancels a write: its request waited for pages, and has left before any step."""
        self._writes.remove(write)
        self._staging.there.add(write.adapter)
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
        staged, coming = self._staging.there, self._staging.coming.keys()
        assert not staged & self._slots.keys() and not staged & coming
        assert len(staged) + len(coming) + len(self._writes) <= MAX_STAGED_ADAPTERS
        assert all(waiting.requests for waiting in self._waiting.values())
