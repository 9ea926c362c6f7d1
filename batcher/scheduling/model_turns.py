"""Which model has the next step, and which models' weights are on the device.

All rows of a step are of one model. The rows of other models keep their slots and pages, and are not in the step. A
model is *live* while a request of it waits or runs. Model 0 is always on the device. Of the others, `max_models - 1`
may be there at a time.

1. The live models on the device take turns of one step each. The next turn is that of the model whose wait is longest,
   counted in turns and multiplied by its weight. The weight is 1 to `MOST_WEIGHT`, in proportion to its requests. Where
   requests have latency targets, the models with targets go first, in the order in which their next tokens are due, if
   one of these would be late after one more turn of another model. A model that has waited for `MOST_WEIGHT` turns of
   each goes before these. So of N such models, each has a turn after at most `(MOST_WEIGHT + 1) * N` turns of others.
2. If the next model can compute nothing now, the others are tried in the same order.
3. Live models that are not on the device are brought one after the other, in the order in which they began to wait,
   while steps of others run. If there is no place, the least recently used model that is not live leaves. If all are
   live, the one that came first leaves, but not before it has had a turn, and not before it has been on the device for
   `SHARE_OF_COPIES` times as long as bringing it took. This time does not count if no model can compute anything.
4. A model that leaves has no more turns. Its weights are dropped when its last step has returned.

So a live model waits for at most `max_models - 1` others to leave, for each live model that began to wait before it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush
from operator import lt

from batcher.scheduling.request_state import RequestState, State
from batcher.scheduling.staging import Staging

MOST_WEIGHT = 4
SHARE_OF_COPIES = 9.0  # bringing a model takes at most a tenth of the time for which it occupies its place


class ModelTurns:
    """Gives models their turns by the rules in the module's docstring. Only the engine's thread calls its methods.

    Args:
        clock: gives seconds.
    """

    def __init__(self, max_models: int, clock: Callable[[], float]) -> None:
        self._num_places = max_models - 1
        self._clock = clock
        self._staging = Staging()
        self._leaving: set[int] = set()  # on the device, without further turns
        self._num_live: dict[int, int] = {}  # live model -> its requests, in the order in which the waits began
        self._num_turns = 0
        self._last_turn: dict[int, int] = {}  # model -> the number of its last turn, or of the turn before its wait
        self._last_turn_s: dict[int, float] = {}  # model -> the time of its last turn
        self._first_tokens = defaultdict[int, list[tuple[tuple[float, int], RequestState]]](list)  # heaps, by deadline
        self._last_step: dict[int, int] = {}  # model on the device -> its last step
        self._stays_until: dict[int, float] = {}  # model on the device, in the order of arrival -> seconds
        self._has_tried: set[int] = set()  # models that have had a turn since they came, or could compute nothing
        self._is_stuck = False  # no model on the device can compute anything
        self.last_done = -1  # the last step that has returned
        self.num_brought = 0

    # --- requests ---

    def add(self, model: int) -> None:
        """Adds a request of the model."""
        if model not in self._num_live:
            self._last_turn[model] = self._num_turns
        self._num_live[model] = self._num_live.get(model, 0) + 1

    def expect(self, seq: RequestState) -> None:
        """Records the deadline of a new request's first token, which is in its `order`."""
        heappush(self._first_tokens[seq.request.model], (seq.order, seq))

    def remove(self, model: int) -> None:
        """Removes a request that has ended."""
        self._num_live[model] -= 1
        if not self._num_live[model]:
            del self._num_live[model]
            self._first_tokens.pop(model, None)

    # --- turns ---

    def is_here(self, model: int) -> bool:
        """Whether the model's weights are on the device and stay there."""
        return not model or (model in self._staging.there and model not in self._leaving)

    def order(self, turn_s: float = 0.0, itl_s: Callable[[int], float] = lambda model: math.inf) -> list[int]:
        """The live models on the device. The first one has the next turn if it can compute anything.

        Args:
            turn_s: the usual time of a turn.
            itl_s: the time between two tokens that a model's running requests may have; infinity if there is no target.
        """
        here = {model: count for model, count in self._num_live.items() if self.is_here(model)}
        most = max(here.values(), default=1)
        due = {m: min(self._first_due(m) - turn_s, self._last_turn_s.get(m, 0.0) + itl_s(m)) for m in here}
        turns_s = [self._clock() + turn_s * number for number in range(1, len(here) + 1)]  # after one of another model
        is_urgent = any(map(lt, sorted(due.values()), turns_s))

        def place(model: int) -> tuple[int, float]:
            wait = self._num_turns - self._last_turn[model]
            if wait >= MOST_WEIGHT * len(here):
                return 0, -wait
            if is_urgent and due[model] < math.inf:
                return 1, due[model]
            return 2, -wait * (1 + (MOST_WEIGHT - 1) * here[model] // most)

        return sorted(here, key=place)

    def _first_due(self, model: int) -> float:
        """The earliest deadline of a first token; infinity if none is expected in time."""
        expected = self._first_tokens[model]
        while expected and ((seq := expected[0][1]).is_last or seq.ttft_s is None or seq.state is State.FINISHED):
            heappop(expected)
        return expected[0][0][0] if expected else math.inf

    def took(self, model: int, step: int) -> None:
        """The model has a turn with this step."""
        self._num_turns += 1
        self._last_turn[model], self._last_turn_s[model], self._last_step[model] = self._num_turns, self._clock(), step
        self._has_tried.add(model)
        self._is_stuck = False

    def none_can_run(self, *, for_long: bool) -> None:
        """No model on the device has anything to compute. `for_long`: nothing that is under way will change this."""
        self._has_tried.update(filter(self.is_here, self._num_live))
        self._is_stuck = for_long

    # --- weights ---

    def on_device(self) -> set[int]:
        """The models whose weights are on the device."""
        return self._staging.there | {0}

    @property
    def is_staging(self) -> bool:
        """Whether a model is being brought."""
        return bool(self._staging.coming)

    def staging(self, *, may_stage: bool) -> tuple[list[int], list[int]]:
        """The models to drop now, and the models to bring after that. Call `staged` with the result of each."""
        staging = self._staging
        cold = self._first_cold() if may_stage and not staging.coming else None
        if cold is not None and len(staging.there) == self._num_places and not self._leaving:
            self._leaving.update(self._victims()[:1])
        gone = {model for model in self._leaving if self._last_step.get(model, -1) <= self.last_done}
        self._leaving -= gone
        staging.drop(gone)
        for model in sorted(gone & self._num_live.keys()):
            self._num_live[model] = self._num_live.pop(model)  # it waits again, after those that wait already
        asked = [cold] if cold is not None and len(staging.there) < self._num_places else []
        staging.ask(asked)
        return staging.take_drops(), asked

    def staged(self, model: int, *, is_there: bool, seconds: float = 0.0) -> None:
        """Records that the model has been brought, which has taken `seconds`, or that it could not be."""
        if not self._staging.came(model, is_there=is_there):
            return
        self.num_brought += 1
        self._stays_until.pop(model, None)
        self._stays_until[model] = self._clock() + SHARE_OF_COPIES * seconds
        self._last_turn[model] = self._num_turns
        self._has_tried.discard(model)
        self._is_stuck = False

    def next_departure(self) -> float | None:
        """When, by the clock, a model may leave for another one. None: none waits, or it may leave now."""
        if self._first_cold() is None or self._staging.coming or self._leaving:
            return None
        now = self._clock()
        times = [self._stays_until[model] for model in self._staging.there & self._has_tried]
        return min((time for time in times if time > now), default=None)

    def unload(self, model: int) -> None:
        """Lets a model leave that no name and no request has any more."""
        if model in self._staging.there and model not in self._num_live:
            self._leaving.add(model)

    def forget(self) -> None:
        """Lets all models but model 0 leave, because the device has lost its state. No step may be in flight."""
        self._leaving.clear()
        self._staging.forget()

    def _first_cold(self) -> int | None:
        """The model to bring next: of the live ones that are not on the device, the one that began to wait first."""
        there = self._staging.there | self._staging.coming.keys()
        return next((model for model in self._num_live if model and model not in there), None)

    def _victims(self) -> list[int]:
        """The models that may leave, the next one first."""
        here = [model for model in self._stays_until if model in self._staging.there]
        unused = [model for model in here if model not in self._num_live]
        if unused:
            return sorted(unused, key=self._last_turn.__getitem__)
        now = self._clock()
        return [m for m in here if m in self._has_tried and (self._is_stuck or now >= self._stays_until[m])]

    def check_integrity(self, running: list[RequestState], waiting: list[RequestState]) -> None:
        """Raises AssertionError if the counts or the places are inconsistent."""
        of_requests = [seq.request.model for seq in (*running, *waiting)]
        assert self._num_live == {model: of_requests.count(model) for model in self._num_live}
        assert self._num_live.keys() == set(of_requests)
        assert len(self._staging.there) + len(self._staging.coming) <= self._num_places
        assert self._leaving <= self._staging.there and 0 not in self._staging.there
