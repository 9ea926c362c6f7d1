"""Happens-before by vector clocks: which accesses to shared memory are ordered, and what is reported of others.

A component of the clocks is a warp, or a mechanism by which asynchronous work completes: a warp's groups of copies, an
mbarrier. A warp's clock says for each component up to which time it has seen what the component did. An access is
stamped with a component and a time, and a later access is ordered after it if the warp's clock has reached this time.

The async proxy sees what threads did through the generic proxy only after a proxy fence (PTX ISA, "Proxies" and
"Causality order"): each warp has a second clock, which says what the fences on the way to it have made visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scripts.lab.ptx.isa import Instruction, Warp

MAX_COMPONENTS = 128


@dataclass(frozen=True)
class Hazard:
    """Something that the ISA leaves undefined, or forbids."""

    kind: str
    message: str
    ins: Instruction
    block: tuple[int, int, int]
    warp: int
    lanes: tuple[int, ...] = ()

    def __str__(self) -> str:
        lanes = f", lanes {_ranges(self.lanes)}" if 0 < len(self.lanes) < 32 else ""
        where = f"block {self.block[0]}, warp {self.warp}{lanes}"
        source = f" ({self.ins.source})" if self.ins.source else ""
        return f"{self.kind}: line {self.ins.line}{source}: {self.ins.text}\n    {where}: {self.message}"


def _ranges(numbers: tuple[int, ...]) -> str:
    found: list[list[int]] = []
    for n in numbers:
        if found and found[-1][1] == n - 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


class Clocks:
    """The components of a block's clocks."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._index: dict[str, int] = {}
        self.asynchronous = np.zeros(MAX_COMPONENTS, bool)  # whether the component accesses through the async proxy

    def component(self, name: str, *, async_proxy: bool = True) -> int:
        """The component of this name, made at its first use."""
        if name not in self._index:
            if len(self.names) == MAX_COMPONENTS:
                raise ValueError(f"more than {MAX_COMPONENTS} warps, mbarriers and kinds of groups: {name=}")
            self._index[name] = len(self.names)
            self.asynchronous[len(self.names)] = async_proxy
            self.names.append(name)
        return self._index[name]


class Shadow:
    """The last accesses to each grain of an array. A grain has the bytes of the narrowest access so far, 16 at most.

    Accesses begin at offsets `starts`, which are multiples of their `width` in bytes.
    """

    def __init__(self, size: int, clocks: Clocks, name: str) -> None:
        self.clocks, self.name, self.shift = clocks, name, 4  # a grain has 1 << shift bytes
        self.writes = np.zeros((3, size >> 4), np.int64)  # component, time, and line; time 0: never
        self.reads: dict[int, np.ndarray] = {}  # by component: times << 32 | lines
        self.last_write, self.last_read = np.zeros((2, MAX_COMPONENTS), np.int64)  # times by component

    def read(self, warp: Warp, starts: np.ndarray, width: int) -> None:
        """A warp reads bytes through the generic proxy."""
        at = self._grains(starts, width)
        self._check_writes(warp, at, warp.clock, "reads")
        self._stamp_read(warp, at, warp.component, int(warp.clock[warp.component]))

    def write(self, warp: Warp, starts: np.ndarray, width: int) -> None:
        """A warp writes bytes through the generic proxy."""
        at = self._grains(starts, width)
        self._check_writes(warp, at, warp.clock, "writes")
        self._check_reads(warp, at, warp.clock, "writes")
        self._stamp_write(warp, at, warp.component, int(warp.clock[warp.component]))

    def read_async(self, warp: Warp, starts: np.ndarray, component: int, time: int) -> None:
        """Work that the warp starts now reads 16 bytes at each start, at the latest when `component` reaches `time`."""
        at = self._grains(starts, 16)
        self._check_writes(warp, at, self._seen(warp, "async"), "starts to read")
        self._stamp_read(warp, at, component, time)

    def write_async(
        self, warp: Warp, starts: np.ndarray, component: int, time: int, *, width: int = 16, proxy: str = "async"
    ) -> None:
        """Work that the warp starts now writes bytes, at the latest when `component` reaches `time`."""
        at, seen = self._grains(starts, width), self._seen(warp, proxy)
        self._check_writes(warp, at, seen, "starts to write")
        self._check_reads(warp, at, seen, "starts to write")
        self._stamp_write(warp, at, component, time)

    def _grains(self, starts: np.ndarray, width: int) -> np.ndarray:
        while width < 1 << self.shift:
            self.shift -= 1
            self.writes = np.repeat(self.writes, 2, axis=1)
            self.reads = {component: np.repeat(x, 2) for component, x in self.reads.items()}
        at, count = starts >> self.shift, width >> self.shift
        return at if count == 1 else (at[:, None] + np.arange(count)).reshape(-1)

    def _seen(self, warp: Warp, proxy: str) -> np.ndarray:
        return warp.clock if proxy == "generic" else np.where(self.clocks.asynchronous, warp.clock, warp.fenced)

    def _stamp_read(self, warp: Warp, at: np.ndarray, component: int, time: int) -> None:
        if component not in self.reads:
            self.reads[component] = np.zeros_like(self.writes[0])
        self.reads[component][at] = time << 32 | warp.line
        self.last_read[component] = time

    def _stamp_write(self, warp: Warp, at: np.ndarray, component: int, time: int) -> None:
        self.writes[:, at] = [[component], [time], [warp.line]]
        self.last_write[component] = time

    def _check_writes(self, warp: Warp, at: np.ndarray, seen: np.ndarray, does: str) -> None:
        if (self.last_write <= seen).all():
            return
        components, times, _ = self.writes
        early = times[at] > seen[components[at]]
        if early.any():
            grain = int(at[early][0])
            component, _, line = self.writes[:, grain].tolist()
            self._report(warp, grain, component, line, does, "written", seen)

    def _check_reads(self, warp: Warp, at: np.ndarray, seen: np.ndarray, does: str) -> None:
        for component in np.flatnonzero(self.last_read > seen).tolist():
            stamps = self.reads[component][at]
            early = stamps >> 32 > seen[component]
            if early.any():
                line = int(stamps[early][0]) & 0xFFFFFFFF
                self._report(warp, int(at[early][0]), component, line, does, "read", seen)

    def _report(self, warp: Warp, grain: int, who: int, line: int, does: str, done: str, seen: np.ndarray) -> None:
        other = self.clocks.names[who]
        is_warp = other.startswith("warp ")
        if is_warp and seen is not warp.clock and warp.clock[who] > seen[who]:
            kind, why = "proxy", "without a fence.proxy.async since"
        elif is_warp:
            kind, why = "race", "without a barrier between"
        else:
            kind, why = "under way", "whose completion it has not waited for"
        verb = f"{done} by {other} at line {line}"
        warp.report(kind, f"{does} {self.name} at byte {grain << self.shift:#x}, {verb} {why}")
