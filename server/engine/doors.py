"""The engine's end of several HTTP processes: what it says, sorted by the doors of those who asked.

A request's outputs are tagged with its door when they are made. Plain tokens come in columns over all requests, and are
split here, on the sender's thread, by the doors that the requests' first outputs had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from batcher.delivery import Tokens
from batcher.request import RequestOutput
from server.engine import outbox, wire

FIRST = 0  # the door of the process that started the engine


@dataclass(frozen=True, slots=True)
class Addressed:
    """An item for one door."""

    door: int
    item: RequestOutput | wire.Output | wire.Event


Item = outbox.Item | Addressed | wire.OpenDoor | wire.CloseDoor


class Visitor:
    """An HTTP process behind its door, with the ids of its open requests. Its `put` may be called from any thread."""

    def __init__(self, door: int, put: Callable[[Addressed], None]) -> None:
        self.open: set[str] = set()
        self._door = door
        self._put = put

    def put(self, item: RequestOutput | wire.Output | wire.Event) -> None:
        if isinstance(item, RequestOutput | wire.Output) and item.finish_reason is not None:
            self.open.discard(item.request_id)
        self._put(Addressed(self._door, item))


class Sorter:
    """Splits what the engine says by door. One thread uses it."""

    def __init__(self) -> None:
        self.doors: set[int] = {FIRST}  # those that are open
        self._door_of: dict[int, int] = {}  # number -> door of requests that have their first output and not the last

    def sort(self, items: Iterable[Item]) -> dict[int, list[outbox.Item]]:
        """The items of each open door, in their order. News for all processes is in the list of each door; other
        events without a door go to the first."""
        sorted_: dict[int, list[outbox.Item]] = {door: [] for door in self.doors}
        for item in items:
            for door, own in self._parts(item):
                if door in sorted_:  # a closed door's requests may have outputs until they are aborted
                    sorted_[door].append(own)
        return sorted_

    def _parts(self, item: Item) -> Iterator[tuple[int, outbox.Item]]:
        match item:
            case Addressed(door=door, item=own):
                if isinstance(own, RequestOutput):
                    self._note(own, door)
                yield door, own
            case Tokens():
                yield from self._split(item)
            case wire.Stats() | wire.Failed() | wire.Ended():
                yield from ((door, item) for door in self.doors)
            case wire.OpenDoor() | wire.CloseDoor():
                raise ValueError("doors are opened and closed between two sortings")
            case _:
                yield FIRST, item

    def _note(self, output: RequestOutput, door: int) -> None:
        if output.finish_reason is None:
            self._door_of[output.number] = door
        else:
            self._door_of.pop(output.number, None)

    def _split(self, tokens: Tokens) -> Iterator[tuple[int, Tokens]]:
        doors = [self._door_of[number] for number in tokens.numbers.tolist()]
        if len(set(doors)) == 1:
            yield doors[0], tokens
            return
        door_of_row = np.array(doors)
        for door in set(doors):
            rows = door_of_row == door
            if tokens.counts is None:
                yield door, Tokens(tokens.numbers[rows], tokens.token_ids[rows])
            else:
                ids = tokens.token_ids[np.repeat(rows, tokens.counts)]
                yield door, Tokens(tokens.numbers[rows], ids, tokens.counts[rows])
