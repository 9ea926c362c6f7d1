"""The waiting requests in the order of their admission: clients share the rows of a step, and so do a client's groups.

A *client* is an API key, and a *group* is what one API request asks for, such as its n samples. Rows are shared among
the requests of one priority:

1. Requests of lower priority numbers go first. Each priority has two *levels*: late and `flex` requests go after all
   others of their priority, and share the rows among themselves.
2. The client that holds the fewest rows goes first. On a tie, the request that arrived first does.
3. The groups of one client are served in the order of arrival, until each holds an eighth of all rows (its *quantum*).
   A group that holds more quanta goes after groups that hold fewer. The quantum keeps the samples of one prompt
   together, which share pages.
4. If there is no room, a request takes the last row of the client that holds the most rows, or else of its own client's
   group that holds the most. The other must hold at least two rows more. A group must also hold more quanta. A request
   may also take a row from such a group of a higher priority number, but never from one of a lower number. It may take
   any row of a request that goes last in its priority, if those hold more than an eighth of all rows.

Each exchange makes the numbers of rows more equal (the sum of their squares falls), so exchanges come to an end. A
client and a group never lose their only row to an exchange, and groups without a row are ordered by arrival, so no
request waits forever. If there is only one client, and each group has one request, the order is that of arrival. With
latency targets, the deadline of the first token takes the place of the arrival (`targets.py`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from batcher.scheduling.request_state import RequestState

_QUANTA = 8  # quanta in all rows: the samples of about 8 prompts run at once, and 8 groups are served evenly

_arrival = attrgetter("arrival")
_order = attrgetter("order")


def _num_rows(group: _Group) -> int:
    return len(group.running)


def _num_rows_of(client: _Client) -> int:
    return client.num_rows


@dataclass(eq=False, slots=True)
class _Group:
    """The requests of one API request. `place` is its entry in its client's order, or None while none of them waits."""

    running: list[RequestState] = field(default_factory=list)  # sorted by arrival
    waiting: list[RequestState] = field(default_factory=list)  # sorted by order
    place: tuple[int, tuple[float, int], _Group] | None = None


@dataclass(eq=False, slots=True)
class _Client:
    """The groups of one client. `order` has the groups with waiting requests: sorted (quanta held, first request's
    order, group)."""

    groups: defaultdict[str, _Group] = field(default_factory=lambda: defaultdict(_Group))
    num_rows: int = 0
    order: list[tuple[int, tuple[float, int], _Group]] = field(default_factory=list)
    place: tuple[int, tuple[float, int], _Client] | None = None

    def largest(self) -> _Group:
        """The group with the most rows. On a tie, it is the group with the latest request."""
        held = [group for group in self.groups.values() if group.running]
        return max(held, key=lambda group: (len(group.running), group.running[-1].arrival))


@dataclass(eq=False, slots=True)
class _Level:
    """The clients of one level. `order` has the clients with waiting requests: sorted (rows held, first request's
    order, client)."""

    clients: defaultdict[int, _Client] = field(default_factory=lambda: defaultdict(_Client))
    order: list[tuple[int, tuple[float, int], _Client]] = field(default_factory=list)


class FairQueue:
    """The waiting requests in the order of their admission, by the rules in the module's docstring. The queue also
    knows the running requests, because their rows decide the order.

    Args:
        num_rows: the number of rows of a step.
    """

    def __init__(self, num_rows: int) -> None:
        self._quantum = max(1, num_rows // _QUANTA)
        self._levels: dict[int, _Level] = {}
        self._numbers: list[int] = []  # of the levels, sorted
        self._num_waiting = 0
        # What requests wait for -> their arrivals -> the requests. They wait, but are not in the order.
        self._set_aside: defaultdict[Hashable, dict[int, RequestState]] = defaultdict(dict)
        self._nothing_for: RequestState | None = None  # could take no row; rows have not changed since then

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[RequestState]:
        """The waiting requests, in no order."""
        for aside in self._set_aside.values():
            yield from aside.values()
        for level in self._levels.values():
            for client in level.clients.values():
                for group in client.groups.values():
                    yield from group.waiting

    def first(self, *, last_first: bool = False) -> RequestState | None:
        """The request to admit next. None: no request waits, except requests that are set aside. With `last_first`,
        those that go last in their priority go first."""
        for number in sorted(self._numbers, key=lambda level: level ^ 1) if last_first else self._numbers:
            order = self._levels[number].order
            if order:
                return order[0][2].order[0][2].waiting[0]
        return None

    @property
    def have_last(self) -> bool:
        """Whether requests wait that go last in their priority. Requests that are set aside do not count."""
        return any(number % 2 and self._levels[number].order for number in self._numbers)

    def behind(self, seq: RequestState) -> Iterator[RequestState]:
        """The waiting requests of the client and the level of a waiting one that go after it."""
        _, client, _ = self._find(seq)
        return (other for *_, group in client.order for other in group.waiting if other.order > seq.order)

    def key(self, seq: RequestState) -> tuple[int, int, int]:
        """The key that a waiting request has if it is admitted now: (level, quanta that its group holds, arrival)."""
        _, _, group = self._find(seq)
        return seq.level, len(group.running) // self._quantum, seq.arrival

    def add(self, seq: RequestState) -> None:
        """Adds a request that waits."""
        level, client, group = self._find(seq)
        insort(group.waiting, seq, key=_order)
        self._num_waiting += 1
        self._put(level, client, group)

    def remove(self, seq: RequestState) -> None:
        """Removes a request that waits no longer."""
        self._num_waiting -= 1
        for waits_for, aside in self._set_aside.items():
            if aside.pop(seq.arrival, None) is not None:
                if not aside:
                    del self._set_aside[waits_for]
                return
        self._take_out(seq)

    def set_aside(self, seq: RequestState, waits_for: Hashable) -> None:
        """Takes a waiting request out of the order until `put_back(waits_for)`."""
        self._take_out(seq)
        self._set_aside[waits_for][seq.arrival] = seq

    def put_back(self, waits_for: Hashable) -> None:
        """Puts the requests that were set aside for `waits_for` back in the order."""
        for seq in self._set_aside.pop(waits_for, {}).values():
            self._num_waiting -= 1
            self.add(seq)

    def admit(self, seq: RequestState) -> None:
        """Gives a waiting request a row."""
        level, client, group = self._find(seq)
        del group.waiting[bisect_left(group.waiting, seq.order, key=_order)]
        insort(group.running, seq, key=_arrival)
        self._num_waiting -= 1
        client.num_rows += 1
        self._nothing_for = None
        self._put(level, client, group)

    def give_row(self, seq: RequestState) -> None:
        """Takes the row of a running request away."""
        level, client, group = self._find(seq)
        del group.running[bisect_left(group.running, seq.arrival, key=_arrival)]
        client.num_rows -= 1
        self._nothing_for = None
        self._put(level, client, group)
        self._forget(seq, level, client, group)

    def giver(self, taker: RequestState, *, of_last: bool = False) -> RequestState | None:
        """The running request that gives its row to a waiting one by rule 4. None: `taker` waits for a row. With
        `of_last`, only requests that go last give theirs."""
        if taker is self._nothing_for:
            return None
        level, client, group = self._find(taker)
        last = self._levels.get(taker.level | 1)
        if last is not None and not taker.is_last:
            held = [other for other in last.clients.values() if other.num_rows]
            if sum(other.num_rows for other in held) > self._quantum:
                return max(held, key=_num_rows_of).largest().running[-1]
        if of_last:
            return None
        most = max(level.clients.values(), key=_num_rows_of)
        if most.num_rows > client.num_rows + 1:
            return most.largest().running[-1]
        for number in reversed(self._numbers[self._numbers.index(taker.level) :]):
            clients = [client] if number == taker.level else self._levels[number].clients.values()
            largest = max((c.largest() for c in clients if c.num_rows), key=_num_rows, default=group)
            if self._holds_more(largest, group):
                return largest.running[-1]
        self._nothing_for = taker
        return None

    def _holds_more(self, group: _Group, other: _Group) -> bool:
        held, others = len(group.running), len(other.running)
        return held > others + 1 and held // self._quantum > others // self._quantum

    def _take_out(self, seq: RequestState) -> None:
        level, client, group = self._find(seq)
        del group.waiting[bisect_left(group.waiting, seq.order, key=_order)]
        self._put(level, client, group)
        self._forget(seq, level, client, group)

    def _find(self, seq: RequestState) -> tuple[_Level, _Client, _Group]:
        request, number = seq.request, seq.level
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level()
            insort(self._numbers, number)
        client = level.clients[request.client]
        return level, client, client.groups[request.group or request.request_id]

    def _put(self, level: _Level, client: _Client, group: _Group) -> None:
        """Moves a group that has changed, and its client, to their places in the order."""
        if group.place is not None:
            del client.order[bisect_left(client.order, group.place)]
            group.place = None
        if group.waiting:
            group.place = (len(group.running) // self._quantum, group.waiting[0].order, group)
            insort(client.order, group.place)
        if client.place is not None:
            del level.order[bisect_left(level.order, client.place)]
            client.place = None
        if client.order:
            client.place = (client.num_rows, client.order[0][1], client)
            insort(level.order, client.place)

    def _forget(self, seq: RequestState, level: _Level, client: _Client, group: _Group) -> None:
        """Drops the group, client and level of `seq` if they have no request any more."""
        request = seq.request
        if not group.waiting and not group.running:
            del client.groups[request.group or request.request_id]
        if not client.groups:
            del level.clients[request.client]
        if not level.clients:
            del self._levels[seq.level]
            self._numbers.remove(seq.level)

    def check_integrity(self, running: list[RequestState]) -> None:
        """Raises AssertionError if the rows or the orders are inconsistent."""
        rows = []
        for level in self._levels.values():
            assert level.order == sorted(level.order)
            for client in level.clients.values():
                assert client.order == sorted(client.order)
                assert client.num_rows == sum(len(group.running) for group in client.groups.values())
                for group in client.groups.values():
                    assert group.waiting or group.running
                    assert (group.place in client.order) == bool(group.waiting)
                    rows += group.running
        assert sorted(rows, key=_arrival) == sorted(running, key=_arrival)
        assert self._num_waiting == sum(1 for _ in self)
