"""Servers that differ in where K/V pages go that the device has no room for, and llama-server with its caches."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from scripts.lab.load.client import Target
from scripts.lab.load.servers import BENCH, Server, fetch, our_server, serving

GIB = 1 << 30
SPARE = 1.25  # of the tiers: the streams' own pages go there, too
DISK_SHARE = 0.25  # of the conversations' pages that host memory holds if there are files behind it


class Tier(StrEnum):
    """A server by its last tier."""

    OFF = "off"
    HOST = "host"
    DISK = "disk"
    LLAMA = "llama-server"


@dataclass(frozen=True, kw_only=True)
class TieredServers:
    """How the servers are started. All have the same pool on the device."""

    flags: Sequence[str]  # of all of ours
    num_pages: int  # of the pool
    page_size: int
    stored_bytes: int  # K/V of all conversations
    context: int  # tokens
    streams: int
    folder: Path  # for pages in files
    llama_server: Path | None
    llama_model: Path | None
    start_timeout_s: float

    @contextmanager
    def start(self, tier: Tier, port: int, *, name: str = "") -> Iterator[Server]:
        """Servers of one name share their files. Raises FailedError if it does not become ready."""
        folder = self.folder / f"{name}{tier}"
        folder.mkdir(mode=0o700, exist_ok=True)
        own = f"kv-{name}{tier}"
        if tier is Tier.LLAMA:
            command = shlex.join(self._llama_command(port, folder))
            with serving(own, command, port, timeout_s=self.start_timeout_s) as process:
                yield Server(Target(base_url=f"http://127.0.0.1:{port}", model=BENCH, ignore_eos=True), process)
        else:
            flags = [*self.flags, f"--num-pages={self.num_pages}", f"--page-size={self.page_size}"]
            flags += self._tier_flags(tier, folder)
            with our_server(own, flags, port, timeout_s=self.start_timeout_s) as server:
                yield server

    def _tier_flags(self, tier: Tier, folder: Path) -> list[str]:
        gib = SPARE * self.stored_bytes / GIB
        if tier is Tier.OFF:
            return []
        if tier is Tier.HOST:
            return [f"--kv-offloading-size={gib:.3f}"]
        files = [f"--kv-offloading-path={folder}", f"--kv-offloading-disk={gib:.3f}"]
        return [f"--kv-offloading-size={DISK_SHARE * gib:.3f}", *files]

    def _llama_command(self, port: int, folder: Path) -> list[str]:
        threads = str(os.cpu_count())
        command = [str(self.llama_server), "-m", str(self.llama_model), "-a", BENCH, "--port", str(port), "--metrics"]
        command += ["-t", threads, "-tb", threads, "-np", str(self.streams), "--kv-unified", "--no-warmup"]
        command += ["-c", str(self.num_pages * self.page_size), "--slot-save-path", f"{folder}/"]
        return [*command, "--cache-ram", str(round(SPARE * self.stored_bytes / (1 << 20)))]


def move_slots(server: Server, action: str, slots: Sequence[int]) -> None:
    """llama-server's `save` or `restore` of these slots. Raises URLError if it refuses."""
    for slot in slots:
        fetch(f"{server.target.base_url}/slots/{slot}?action={action}", {"filename": f"slot-{slot}.bin"})
