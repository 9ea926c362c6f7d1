"""Faults of files of K/V pages and of the disk that they are on, while servers run over them."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from enum import StrEnum
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
DISK_BYTES = 32 << 20
SLOW_S = 0.05  # that opening a file takes
# A process with this module makes way for a slow disk whenever it opens a file of the folder, or lists it.
SLOW = f"""
import os, sys, time

def hook(event, args):
    if event in ("open", "os.scandir") and str(args[0]).startswith(os.environ["SLOW_FOLDER"]):
        if os.path.exists(os.environ["SLOW_IF"]):
            time.sleep({SLOW_S})

sys.addaudithook(hook)
"""


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
    """With another one of its folder, which may be itself."""
    other, aside = random.choice([file, *file.parent.iterdir()]), file.with_name("aside")
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


class State(StrEnum):
    """Of a disk."""

    SOUND = "sound"
    SLOW = "slow"
    FULL = "full"
    READ_ONLY = "read only"


class Disk:
    """A folder on a disk whose state changes. One that fills or may only be read is a file system of its own, which
    only root can mount: without, these states are missing.

    Args:
        beside: an empty folder for what the processes need that use the disk.
    """

    def __init__(self, folder: Path, beside: Path, *, is_mounted: bool) -> None:
        self.state = State.SOUND
        self.states = [*State] if is_mounted else [State.SOUND, State.SLOW]
        self._folder = folder
        self._slow = beside / "slow"
        (beside / "sitecustomize.py").write_text(SLOW)
        self.env: Mapping[str, str] = os.environ | {
            "PYTHONPATH": str(beside), "SLOW_FOLDER": str(folder), "SLOW_IF": str(self._slow)
        }  # fmt: skip

    def become(self, state: State) -> None:
        """The disk is in this state, and in no other."""
        if self.state is State.READ_ONLY:
            _mount("-o", "remount,rw", str(self._folder))
        filler = self._folder / "filler"
        filler.unlink(missing_ok=True)
        self._slow.unlink(missing_ok=True)
        if state is State.SLOW:
            self._slow.touch()
        elif state is State.FULL:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
        elif state is State.READ_ONLY:
            while not _mount("-o", "remount,ro", str(self._folder)):  # a page is being written
                pass
        self.state = state


@contextmanager
def disk(folder: Path, beside: Path) -> Iterator[Disk]:
    """A disk of DISK_BYTES on the folder, if this process may mount it."""
    is_mounted = _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder))
    try:
        yield Disk(folder, beside, is_mounted=is_mounted)
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(*args: str) -> bool:
    return subprocess.run(["mount", *args], capture_output=True, check=False).returncode == 0


class FaultyRun:
    """Requests at servers, one after the other, over files that are damaged meanwhile.

    Args:
        told: the texts of `BODIES`.
        of_a_server: answers of each server. The disk's next state comes after a third of them.
    """

    def __init__(self, told: Sequence[str], folder: Path, disk: Disk, num_requests: int, of_a_server: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[int, str]] = []  # the number of the request, and its text
        self._told, self._folder, self._disk, self._of_a_server = told, folder, disk, of_a_server
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
        if self._num_answered == self._of_a_server // 3:
            states = self._disk.states
            self._disk.become(states[(states.index(self._disk.state) + 1) % len(states)])
            self.counts[f"disk {self._disk.state}"] += 1
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
