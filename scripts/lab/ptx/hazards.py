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
    """The last accesses to each byte of an array."""

    def __init__(self, size: int, clocks: Clocks, name: str) -> None:
        self.clocks, self.name, self.size = clocks, name, size
        self.writer = np.zeros(size, np.int16)  # components
        self.written = np.zeros(size, np.int32)  # times; 0: never
        self.write_line = np.zeros(size, np.int32)
        self.reads: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by component: times, lines

    def read(self, warp: Warp, offsets: np.ndarray) -> None:
        """A warp reads bytes through the generic proxy."""
        self._check_writes(warp, offsets, warp.clock, "reads")
        self._stamp_read(warp, offsets, warp.component, int(warp.clock[warp.component]))

    def write(self, warp: Warp, offsets: np.ndarray) -> None:
        """A warp writes bytes through the generic proxy."""
        self._check_writes(warp, offsets, warp.clock, "writes")
        self._check_reads(warp, offsets, warp.clock)
        self._stamp_write(warp, offsets, warp.component, int(warp.clock[warp.component]))

    def read_async(self, warp: Warp, offsets: np.ndarray, component: int, time: int, *, proxy: str = "async") -> None:
        """Work that the warp starts now reads bytes, at the latest when `component` reaches `time`."""
        self._check_writes(warp, offsets, self._seen(warp, proxy), "starts to read")
        self._stamp_read(warp, offsets, component, time)

    def write_async(self, warp: Warp, offsets: np.ndarray, component: int, time: int, *, proxy: str = "async") -> None:
        """Work that the warp starts now writes bytes, at the latest when `component` reaches `time`."""
        seen = self._seen(warp, proxy)
        self._check_writes(warp, offsets, seen, "starts to write")
        self._check_reads(warp, offsets, seen, "starts to write")
        self._stamp_write(warp, offsets, component, time)

    def _seen(self, warp: Warp, proxy: str) -> np.ndarray:
        return warp.clock if proxy == "generic" else np.where(self.clocks.asynchronous, warp.clock, warp.fenced)

    def _stamp_read(self, warp: Warp, offsets: np.ndarray, component: int, time: int) -> None:
        if component not in self.reads:
            self.reads[component] = np.zeros(self.size, np.int32), np.zeros(self.size, np.int32)
        times, lines = self.reads[component]
        times[offsets] = time
        lines[offsets] = warp.line

    def _stamp_write(self, warp: Warp, offsets: np.ndarray, component: int, time: int) -> None:
        self.writer[offsets] = component
        self.written[offsets] = time
        self.write_line[offsets] = warp.line

    def _check_writes(self, warp: Warp, offsets: np.ndarray, seen: np.ndarray, does: str) -> None:
        early = self.written[offsets] > seen[self.writer[offsets]]
        if early.any():
            byte = int(offsets[early][0])
            self._report(warp, byte, int(self.writer[byte]), int(self.write_line[byte]), does, "written", seen)

    def _check_reads(self, warp: Warp, offsets: np.ndarray, seen: np.ndarray, does: str = "writes") -> None:
        for component, (times, lines) in self.reads.items():
            early = times[offsets] > seen[component]
            if early.any():
                byte = int(offsets[early][0])
                self._report(warp, byte, component, int(lines[byte]), does, "read", seen)

    def _report(self, warp: Warp, byte: int, component: int, line: int, does: str, done: str, seen: np.ndarray) -> None:
        other = self.clocks.names[component]
        is_warp = other.startswith("warp ")
        if is_warp and seen is not warp.clock and warp.clock[component] > seen[component]:
            kind, why = "proxy", "without a fence.proxy.async since"
        elif is_warp:
            kind, why = "race", "without a barrier between"
        else:
            kind, why = "under way", "whose completion it has not waited for"
        verb = f"{done} by {other} at line {line}"
        warp.report(kind, f"{does} {self.name} at byte {byte:#x}, {verb} {why}")
