"""How much memory a device has: what a chip reports, or of a host what the machine and its containers allow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Of one device, in bytes."""

    total: int
    free: int  # not in use by anyone, once the weights are there
    is_host: bool  # the machine's own memory: a CPU


def device_memory(device: jax.Device) -> DeviceMemory:
    """ValueError where the device does not say how much memory it has."""
    if device.platform == "cpu":
        total, free = _host_memory()
        return DeviceMemory(total=total, free=free, is_host=True)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(f"{device} does not report its memory; say how many pages to use with --num-pages")
    return DeviceMemory(total=stats["bytes_limit"], free=stats["bytes_limit"] - stats["bytes_in_use"], is_host=False)


def _host_memory() -> tuple[int, int]:
    """Total and free bytes of this machine, or of the container that this process runs in."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(meminfo[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for limit, used in cgroup_limits(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup")):
        if limit < total:
            total, free = limit, min(free, limit - used)
    return total, max(free, 0)


def cgroup_limits(groups: str, root: Path) -> list[tuple[int, int]]:
    """(limit, used) bytes of every memory control group, version 2 or 1, that `groups` lists and that has a limit.

    Used is what the kernel cannot give back: the usage without the page cache, on both of its lists. A file moves from
    the inactive list to the active one when it is read a second time, as weights are by a second start.

    Args:
        groups: `/proc/self/cgroup`. Inside a container its paths may be the host's, which are not mounted under `root`;
            the group is then what is mounted there itself.
    """
    found = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounted, names, prefix = root, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            mounted, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            prefix = "total_"  # with the groups below, as the usage
        else:
            continue
        for folder in {mounted / path.lstrip("/"), mounted}:
            limit, used = (folder / name for name in names)
            if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
                kept = int(used.read_text()) - _page_cache(folder / "memory.stat", prefix)
                found.append((int(limit.read_text()), max(kept, 0)))
    return found


def _page_cache(statistics: Path, prefix: str) -> int:
    """Bytes of files that are kept in spare memory; 0 where the kernel does not count them."""
    lines = statistics.read_text().splitlines() if statistics.is_file() else []
    counted = {name: int(value) for name, value in map(str.split, lines)}
    return sum(counted.get(f"{prefix}{part}_file", 0) for part in ("active", "inactive"))
