"""Counts in shared memory, which all HTTP processes of a server read for their limits and for the choice of an engine.

Each process writes its own row and reads all rows, so there are no locks, and a process that is killed leaves none
behind. Every cell is a 64-bit integer. The parent clears the row of a process that has ended.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    Cells = ctypes.Array[ctypes.c_int64]
    Words = ctypes.Array[ctypes.c_uint64]

IN_FLIGHT, FIRST_OTHER = 0, 1  # columns; two for each engine and one for each key follow
NUM_WORDS, WAYS = 1 << 17, 8  # the words of the table of prefixes, a megabyte, and the words of a row
ENGINE_BITS, TIME_BITS = 11, 28  # the bits of a word for the engine and the time; the rest are bits of a digest
MOST_ENGINES = (1 << ENGINE_BITS) - 1
PROMISED = 0  # the value of a time that is not known yet
_TIME_MASK = (1 << TIME_BITS) - 1
_REST_MASK = (1 << 64 - ENGINE_BITS - TIME_BITS) - 1


class Load(NamedTuple):
    """The work that an engine has."""

    num_open: int  # requests
    num_queued: int  # tokens to compute before their first tokens, of the requests that have none yet


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedCounts:
    """The table of all processes. It can be passed to a process that is being started."""

    num_processes: int
    num_engines: int
    num_keys: int
    cells: Any  # Cells: a row for each process
    words: Any  # Words: the contents of a `PrefixTable`
    drained: Any  # ctypes.c_bool: whether an administrator has closed the server for new requests

    @classmethod
    def made(cls, num_processes: int, num_engines: int, num_keys: int) -> SharedCounts:
        """A new table, in which all counts are 0."""
        context = multiprocessing.get_context("spawn")
        width = FIRST_OTHER + 2 * num_engines + num_keys
        return cls(
            num_processes=num_processes,
            num_engines=num_engines,
            num_keys=num_keys,
            cells=context.RawArray(ctypes.c_int64, num_processes * width),
            words=context.RawArray(ctypes.c_uint64, NUM_WORDS + MOST_ENGINES if num_engines > 1 else 1),
            drained=context.RawValue(ctypes.c_bool, False),
        )

    @property
    def width(self) -> int:
        return FIRST_OTHER + 2 * self.num_engines + self.num_keys

    def clear(self, process: int) -> None:
        """Sets the row of a process that has ended to zeros."""
        start = process * self.width
        self.cells[start : start + self.width] = [0] * self.width

    def column(self, column: int) -> Sequence[int]:
        cells: Sequence[int] = self.cells[column :: self.width]
        return cells


class Row:
    """The row of this process, and sums over the rows of all processes."""

    def __init__(self, counts: SharedCounts, process: int) -> None:
        self.counts = counts
        self._cells = counts.cells
        self._start = process * counts.width

    def set_in_flight(self, number: int) -> None:
        self._cells[self._start + IN_FLIGHT] = number

    @property
    def in_flight(self) -> int:
        """Requests that are being answered, by all processes."""
        return sum(self.counts.column(IN_FLIGHT))

    def set_open(self, engine: int, number: int) -> None:
        self._cells[self._start + FIRST_OTHER + 2 * engine] = number

    def set_queued(self, engine: int, tokens: int) -> None:
        self._cells[self._start + FIRST_OTHER + 2 * engine + 1] = tokens

    def loads(self) -> list[Load]:
        """The load of each engine, summed over all processes."""
        sums = [sum(self.counts.column(FIRST_OTHER + column)) for column in range(2 * self.counts.num_engines)]
        return [Load(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]

    def change_key(self, key: int, change: int) -> int:
        """Adds `change` to the key's requests in this process. Returns the key's requests in all processes.

        The process writes its own count before it reads the others. So when two processes count at once, at least one
        of them sees both requests.
        """
        column = FIRST_OTHER + 2 * self.counts.num_engines + key
        self._cells[self._start + column] += change
        return sum(self.counts.column(column))


class PrefixTable:
    """Holds which engines have computed which beginnings of prompts, and when they have last used them.

    The last bits of a digest name a row of WAYS words, the most recently written first. A new word replaces the last
    one. A word holds further bits of the digest, a time in ticks and the engine. After the rows there is a word for
    each engine: the time up to which its last uses count as evicted. A race between two processes may lose a word, or
    keep it twice.
    """

    def __init__(self, counts: SharedCounts | None = None) -> None:
        """`counts` hold the table of several processes; None: the table belongs to this process."""
        self._words = (ctypes.c_uint64 * (NUM_WORDS + MOST_ENGINES))() if counts is None else counts.words

    def get(self, digest: int) -> dict[int, int]:
        """The time of the last use, or PROMISED, by each engine that has not evicted this beginning."""
        start, rest = _place(digest)
        found: dict[int, int] = {}
        for word in self._words[start : start + WAYS]:
            if word >> ENGINE_BITS + TIME_BITS == rest and (number := word & MOST_ENGINES):
                engine, used = number - 1, word >> ENGINE_BITS & _TIME_MASK
                if used == PROMISED or used >= self._words[NUM_WORDS + engine]:
                    found.setdefault(engine, used)
        return found

    def put(self, digest: int, engine: int, used: int) -> None:
        """Notes that the engine has used this beginning at this time, or will use it (PROMISED)."""
        start, rest = _place(digest)
        words = self._words[start : start + WAYS]
        own = rest << TIME_BITS << ENGINE_BITS | engine + 1
        others = [word for word in words if word & ~(_TIME_MASK << ENGINE_BITS) != own]
        own |= (used & _TIME_MASK) << ENGINE_BITS
        self._words[start : start + WAYS] = [own, *others, *[0] * WAYS][:WAYS]

    def evicted(self, engine: int, used: int) -> None:
        """Notes that the engine has evicted all beginnings that it had last used at this time or before."""
        self._words[NUM_WORDS + engine] = max(self._words[NUM_WORDS + engine], used)

    def clear(self) -> None:
        ctypes.memset(self._words, 0, ctypes.sizeof(self._words))


def _place(digest: int) -> tuple[int, int]:
    """Where the row of a digest starts, and the bits that its words hold."""
    rest, row = divmod(digest, NUM_WORDS // WAYS)
    return row * WAYS, rest & _REST_MASK
