"""How many K/V pages fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax

from batcher.slots import SlotLayout
from model.config import LlamaConfig
from model.sampling.threshold import PARTS_ON_CHIPS

GIB = 1 << 30

# On a CPU the K/V share the memory with everything else on the machine, and no CPU is fast enough to fill much more.
MAX_CPU_KV_BYTES = 4 * GIB
# Pages beyond what all running requests can need at once hold the prefix cache.
PREFIX_CACHE_SHARE = 1.0


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Of one device, in bytes."""

    total: int
    free: int  # not in use by anyone, once the weights are there
    is_host: bool  # the machine's own memory: a CPU


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """What one device must hold besides the pages, in bytes."""

    weights: int
    state: int  # slot state and token histories
    temporaries: int  # of the largest program


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


def state_bytes(config: LlamaConfig, *, num_slots: int, pages_per_seq: int, num_shards: int) -> int:
    """Of the slots, which every device holds, and of its part of their token histories."""
    return 4 * num_slots * (SlotLayout.width(pages_per_seq) + config.vocab_size // num_shards)


def temporaries_bound(config: LlamaConfig, *, num_tokens: int, num_rows: int, itemsize: int, num_shards: int) -> int:
    """Bytes that the largest program may need besides its arguments, on one device: an upper bound by shapes.

    `ModelRunner.warm_up` compares it with what the compiler says.
    """
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 6 * config.hidden_size + (3 * attention + 3 * config.intermediate_size) // num_shards
    bytes_per_logit = 6 * 4  # adjusted, weights, kept ones and what a partial fusion leaves
    if num_shards > 1:
        bytes_per_logit += PARTS_ON_CHIPS  # which of so many thresholds it reaches, where a compiler writes that out
    logits = num_rows * (config.vocab_size // num_shards) * bytes_per_logit
    return num_tokens * per_token * max(itemsize, 4) + logits + 64 * 2**20


def plan_pages(
    *,
    memory: DeviceMemory,
    needs: MemoryNeeds,
    memory_utilization: float,
    page_bytes: int,  # of all layers, on one device
    page_size: int,  # tokens
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Pages that can be owned, so many that every running request may reach max_model_len if memory allows.

    Raises:
        ValueError: not even one request of max_model_len fits. The message has the GiB of each part and the flags.
    """
    pages_per_seq = -(-max_model_len // page_size)
    beside_weights = min(int(memory.total * memory_utilization) - needs.weights, memory.free)
    budget = beside_weights - needs.state - needs.temporaries
    fitting = budget // page_bytes - 1  # without the null page
    if fitting < pages_per_seq:
        raise ValueError(_does_not_fit(memory, needs, memory_utilization, pages_per_seq * page_bytes, max_model_len))
    wanted = int(pages_per_seq * max_num_seqs * (1 + PREFIX_CACHE_SHARE))
    if memory.is_host:
        wanted = min(wanted, max(MAX_CPU_KV_BYTES // page_bytes, pages_per_seq))
    return min(fitting, wanted)


def _does_not_fit(
    memory: DeviceMemory, needs: MemoryNeeds, utilization: float, sequence_bytes: int, max_model_len: int
) -> str:
    def gib(size: int) -> str:
        return f"{size / GIB:.2f} GiB"

    where = "this machine" if memory.is_host else "each device"
    return (
        f"the model does not fit: {where} has {gib(memory.total)}, of which {utilization:.0%} may be used and "
        f"{gib(max(memory.free, 0))} are free besides the weights. Needed: weights {gib(needs.weights)}, temporaries "
        f"of the largest step {gib(needs.temporaries)}, state of the request slots {gib(needs.state)}, K/V pages of "
        f"one request of {max_model_len} tokens {gib(sequence_bytes)}. Lower --max-model-len (K/V), "
        f"--max-num-batched-tokens (temporaries) or --max-num-seqs (state, temporaries), raise --memory-utilization, "
        f"take --dtype bfloat16, or spread the model over more devices with --tensor-parallel-size"
    )
