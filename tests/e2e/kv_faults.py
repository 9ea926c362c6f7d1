"""Faults of files of K/V pages, while servers run over them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Lock

import httpx
import psutil

from tests.e2e.conftest import DemoServer
from tests.e2e.kv_crowd import BODIES, BROKEN, FROM_FILES, FROM_HOST, SAVED, counts, files_of, healthy, text_of

NUM_CLIENTS = 40
SHARE = 1 / 3  # of the answers that a fault follows
COUNTED = (SAVED, FROM_HOST, FROM_FILES, BROKEN, "kv_offload_failed_transfers_total")


def flip_a_bit(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def replace_by_link(file: Path, random: Random) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def replace_by_pipe(file: Path, random: Random) -> None:
    file.unlink()
    os.mkfifo(file)


def exchange(file: Path, random: Random) -> None:
    """With another one."""
    other, aside = random.choice([file, *file.parent.parent.rglob("*.page")]), file.with_name("aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


def add_foreign(file: Path, random: Random) -> None:
    """Files that are nobody's, and one that has a page's name."""
    (file.parent / "readme").write_text("not a page")
    (file.parent.parent / "readme").write_text("not a page")
    file.with_name(f"{random.randbytes(16).hex()}.page").write_bytes(random.randbytes(file.stat().st_size))


def delete_all_beside(file: Path, random: Random) -> None:
    for other in file.parent.iterdir():
        other.unlink()
    file.parent.rmdir()


DAMAGE: dict[str, Callable[[Path, Random], object]] = {
    "flipped": flip_a_bit,
    "half": lambda file, random: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file, random: os.truncate(file, 0),
    "junk": lambda file, random: file.write_bytes(random.randbytes(file.stat().st_size)),
    "longer": lambda file, random: file.write_bytes(file.read_bytes() * 2),
    "link": replace_by_link,
}
FAULTS = DAMAGE | {
    "pipe": replace_by_pipe,
    "deleted": lambda file, random: file.unlink(),
    "exchanged": exchange,
    "foreign": add_foreign,
    "folder deleted": delete_all_beside,
}


class FaultyRun:
    """Requests at servers, one after the other, over files that are damaged meanwhile.

    Args:
        told: the texts of `BODIES`.
        of_a_server: answers of each server.
    """

    def __init__(self, told: Sequence[str], folder: Path, num_requests: int, of_a_server: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[int, str]] = []  # the number of the request, and its text
        self._told, self._folder, self._of_a_server = told, folder, of_a_server
        self._random = Random(0)
        self._lock = Lock()  # of all here
        self._left = self._random.choices(range(len(BODIES)), k=num_requests)
        self._num_answered = 0  # by this server
        self._num_servers = 0
        self._ends_killed = self._is_killed = False

    @property
    def is_done(self) -> bool:
        return not self._left

    def load(self, server: DemoServer) -> None:
        """The requests of a server. Two of three are killed under them, and later ones have to answer these."""
        self._num_answered, self._is_killed = 0, False
        self._num_servers += 1
        self._ends_killed = self._num_servers % 3 > 0
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for client in [pool.submit(self._ask, server) for _ in range(NUM_CLIENTS)]:
                client.result()
        if not self._is_killed:
            self._count(healthy(server))
            server.process.terminate()
            assert server.process.wait(60) == 0
        self.counts["killed" if self._is_killed else "ended"] += 1

    def _ask(self, server: DemoServer) -> None:
        with server.http() as http:
            while (number := self._next()) is not None:
                try:
                    text = text_of(http, BODIES[number])
                except (httpx.TransportError, AssertionError):
                    if not self._is_killed:
                        raise
                    with self._lock:
                        self._left.append(number)
                        self.counts["asked again"] += 1
                    return
                with self._lock:
                    self._answered(server, number, text)

    def _next(self) -> int | None:
        with self._lock:
            return self._left.pop() if self._left and self._num_answered < self._of_a_server else None

    def _answered(self, server: DemoServer, number: int, text: str) -> None:
        self.counts["answers"] += 1
        self._num_answered += 1
        if text != self._told[number]:
            self.wrong.append((number, text))
        if self._random.random() < SHARE:
            self._damage()
        if self._num_answered == self._of_a_server and self._ends_killed:
            self._count(counts(server))
            engine, self._is_killed = server.engine_process(), True
            engine.kill()
            server.process.kill()
            gone, _ = psutil.wait_procs([engine], 30)
            assert gone

    def _damage(self) -> None:
        kind = self._random.choice(list(FAULTS))
        with suppress(OSError):  # a file has gone, or the disk takes no fault
            files = [file for file in files_of(self._folder) if file.suffix == ".page" and file.stat().st_size]
            if files:
                FAULTS[kind](self._random.choice(files), self._random)
                self.counts[kind] += 1

    def _count(self, found: Mapping[str, float]) -> None:
        self.counts.update({name: int(found[name]) for name in COUNTED})
