"""The memory of a device. A chip reports it; for a CPU it is what the machine and its containers allow."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pallas_kernels import chips

if TYPE_CHECKING:  # processes choose their chips before they import jax
    import jax

# For a described chip: the part of a program's memory that the runtime and the loaded programs may take.
CHIP_RESERVE = chips.GIB // 4
GPU_RESERVE = chips.GIB  # and CUDA's context, and what the driver has less than the table says


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    total: int
    free: int  # not in use, once the weights are in place
    is_host: bool  # the device is a CPU, and this is the machine's memory


def device_memory(device: jax.Device) -> DeviceMemory:
    """The memory of a device. A described chip has the memory of the table, and nothing is in use. Raises ValueError if
    the device does not report its memory."""
    if device.platform == "cpu":
        return host_memory()
    if device.client.runtime_type == "compile_only_runtime":
        if device.platform == "gpu":
            (memory,) = (chip.memory_bytes for chip in chips.GPUS.values() if chip.device_kind == device.device_kind)
            total = int(memory * chips.GPU_POOL_SHARE)
            return DeviceMemory(total=total, free=total - GPU_RESERVE, is_host=False)
        from pallas_kernels.tpu.blocks import this_chip

        total = int(chips.TPUS[this_chip()].memory_gib * chips.GIB)
        return DeviceMemory(total=total, free=total - CHIP_RESERVE, is_host=False)
    stats = device.memory_stats() or {}
    if not stats and device.platform == "gpu":  # jax counts no memory for the allocator that maps it
        free, total = _asked_of_driver(device.local_hardware_id)
        outside = int((1 - chips.GPU_POOL_SHARE) * total)
        return DeviceMemory(total=total - outside, free=max(free - outside, 0), is_host=False)
    if "bytes_limit" not in stats:
        raise ValueError(f"{device} does not report its memory; say how many pages to use with --num-pages")
    return DeviceMemory(total=stats["bytes_limit"], free=stats["bytes_limit"] - stats["bytes_in_use"], is_host=False)


def _asked_of_driver(number: int) -> tuple[int, int]:
    """The free and total bytes of the GPU of this number among those that this process sees."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    failed = (
        driver.cuDeviceGet(ctypes.byref(device), number)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or driver.cuCtxPushCurrent_v2(context)
        or driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        or driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        or driver.cuDevicePrimaryCtxRelease_v2(device)
    )
    if failed:
        raise ValueError(f"GPU {number} does not report its memory (CUDA's error {failed}): use --num-pages")
    return free.value, total.value


def return_freed_memory() -> None:
    """Returns memory to the machine that this process has freed but glibc keeps. After a compilation it is hundreds of
    MiB, in pieces in the arenas of the compiler's threads."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def host_memory() -> DeviceMemory:
    """The memory of this machine, or of the container in which this process runs."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(meminfo[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for limit, used in cgroup_limits(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup")):
        if limit < total:
            total, free = limit, min(free, limit - used)
    return DeviceMemory(total=total, free=max(free, 0), is_host=True)


def cgroup_limits(groups: str, root: Path) -> list[tuple[int, int]]:
    """The (limit, used) bytes of every memory control group, version 2 or 1, that `groups` lists and that has a limit.

    `used` excludes the page cache, both its inactive and its active list, because the kernel can reclaim it. A file
    moves to the active list when it is read again, such as weights at a second start.

    Args:
        groups: the text of `/proc/self/cgroup`. Inside a container its paths may be those of the host, which are not
            mounted under `root`. The mounted root is then the container's group.
    """
    found = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounted, names, prefix = root, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            mounted, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            prefix = "total_"  # the sums that include child groups, as the usage does
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (mounted / part for part in (group, *group.parents)):  # a limit holds for all groups below
            limit, used = (folder / name for name in names)
            if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
                kept = int(used.read_text()) - _page_cache(folder / "memory.stat", prefix)
                found.append((int(limit.read_text()), max(kept, 0)))
    return found


def _page_cache(statistics: Path, prefix: str) -> int:
    """The bytes of files in the page cache; 0 if the kernel does not report them."""
    lines = statistics.read_text().splitlines() if statistics.is_file() else []
    counted = {name: int(value) for name, value in map(str.split, lines)}
    return sum(counted.get(f"{prefix}{part}_file", 0) for part in ("active", "inactive"))
