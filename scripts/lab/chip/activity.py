"""What the device does while a function runs, by jax's profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData

LINES = ("Stream", "XLA Ops")  # of a GPU's kernels and copies; of a TPU's operations


@dataclass(frozen=True, kw_only=True)
class Activity:
    """The events on the first device."""

    num_events: int  # kernels and copies
    busy_s: float  # in which at least one of them ran
    span_s: float  # from the first one's start to the last one's end

    @property
    def busy_share(self) -> float:
        """The part of the span in which the device was busy."""
        return self.busy_s / self.span_s


def device_activity(run: Callable[[], None]) -> Activity | None:
    """The activity during `run`, which waits for its results; None if the profiler does not see this device."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        events = [event for path in Path(folder).rglob("*.xplane.pb") for event in _events(path)]
    return activity(events) if events else None


def activity(events: Iterable[tuple[float, float]]) -> Activity:
    """The activity of (start, end) in nanoseconds, of which some may overlap."""
    ordered = sorted(events)
    busy, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return Activity(num_events=len(ordered), busy_s=busy / 1e9, span_s=(reached - ordered[0][0]) / 1e9)


def _events(path: Path) -> list[tuple[float, float]]:
    planes = sorted(ProfileData.from_file(str(path)).planes, key=lambda plane: plane.name)
    device = next((plane for plane in planes if plane.name.startswith("/device:")), None)
    if device is None:
        return []
    return [
        (event.start_ns, event.start_ns + event.duration_ns)
        for line in device.lines
        if line.name.startswith(LINES)
        for event in line.events
    ]
