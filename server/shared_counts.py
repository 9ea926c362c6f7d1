"""Counts that all HTTP processes of a server see, in shared memory: what a limit or a choice needs from the others.

Each process writes its own row and reads all of them, so nothing is locked, and a process that is killed leaves no
lock behind. Every cell is a whole 64-bit number. The parent clears the row of a process that has ended.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Cells = ctypes.Array[ctypes.c_int64]
    Words = ctypes.Array[ctypes.c_uint64]

ABSENT = -1  # connections of a process that does not accept any
IN_FLIGHT, CONNECTIONS, FIRST_OTHER = 0, 1, 2  # columns; those of the engines and of the keys follow
NUM_WORDS = 1 << 16  # remembered prefixes: half a megabyte
ENGINE_BITS = 16
_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedCounts:
    """The whole table. It can be passed to a process that is being started."""

    num_processes: int
    num_engines: int
    num_keys: int
    cells: Any  # Cells: a row for each process
    words: Any  # Words: see `PrefixTable`

    @classmethod
    def made(cls, num_processes: int, num_engines: int, num_keys: int) -> SharedCounts:
        """A new one, on which no process is present."""
        context = multiprocessing.get_context("spawn")
        width = FIRST_OTHER + num_engines + num_keys
        counts = cls(
            num_processes=num_processes,
            num_engines=num_engines,
            num_keys=num_keys,
            cells=context.RawArray(ctypes.c_int64, num_processes * width),
            words=context.RawArray(ctypes.c_uint64, NUM_WORDS if num_engines > 1 else 1),
        )
        for number in range(num_processes):
            counts.clear(number)
        return counts

    @property
    def width(self) -> int:
        return FIRST_OTHER + self.num_engines + self.num_keys

    def clear(self, process: int) -> None:
        """The process has ended."""
        start = process * self.width
        for column in range(self.width):
            self.cells[start + column] = ABSENT if column == CONNECTIONS else 0

    def column(self, column: int) -> Sequence[int]:
        cells: Sequence[int] = self.cells[column :: self.width]
        return cells


class Row:
    """The row of this process, and sums over all of them."""

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

    def set_load(self, engine: int, number: int) -> None:
        self._cells[self._start + FIRST_OTHER + engine] = number

    def loads(self) -> list[int]:
        """Open requests of each engine, from all processes."""
        return [sum(self.counts.column(FIRST_OTHER + engine)) for engine in range(self.counts.num_engines)]

    def set_connections(self, number: int) -> None:
        self._cells[self._start + CONNECTIONS] = number

    @property
    def connections(self) -> int:
        return sum(number for number in self.counts.column(CONNECTIONS) if number != ABSENT)

    @property
    def is_first(self) -> bool:
        """Whether no process that accepts connections has fewer than this one."""
        own: int = self._cells[self._start + CONNECTIONS]
        return all(number == ABSENT or number >= own for number in self.counts.column(CONNECTIONS))

    def change_key(self, key: int, change: int) -> int:
        """Counts a request of the key, or its end. Returns the requests of the key in all processes.

        This process counts before it looks. So of two processes that do it at once at least one sees both requests.
        """
        column = FIRST_OTHER + self.counts.num_engines + key
        self._cells[self._start + column] += change
        return sum(self.counts.column(column))


class PrefixTable:
    """Which engine has computed which beginning of a prompt: a table by the digest's last bits. A later digest in the
    same place replaces an earlier one. A word holds the rest of the digest and the engine."""

    def __init__(self, counts: SharedCounts | None = None) -> None:
        """`counts` are those of several processes; None: the table is this process's own."""
        self._words = (ctypes.c_uint64 * NUM_WORDS)() if counts is None else counts.words

    def get(self, digest: int) -> int | None:
        word = self._words[digest % NUM_WORDS]
        known, engine = word >> ENGINE_BITS, word & ((1 << ENGINE_BITS) - 1)
        return engine - 1 if engine and known == _rest(digest) else None

    def put(self, digest: int, engine: int) -> None:
        self._words[digest % NUM_WORDS] = _rest(digest) << ENGINE_BITS | engine + 1

    def clear(self) -> None:
        ctypes.memset(self._words, 0, ctypes.sizeof(self._words))


def _rest(digest: int) -> int:
    return (digest & _MASK) // NUM_WORDS
