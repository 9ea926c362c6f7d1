"""Brings the weights of LoRA adapters to the device."""

from __future__ import annotations

from typing import NamedTuple

from batcher.step import Runner


class Staged(NamedTuple):
    """An adapter is on the device, or its weights cannot be read."""

    adapter: int
    error: Exception | None


def stage(runner: Runner, adapter: int) -> Staged:
    """Stages the adapter on this thread. Raises errors that are not of the adapter's files."""
    try:
        runner.stage_adapter(adapter)
    except (ValueError, OSError) as error:
        return Staged(adapter, error)
    return Staged(adapter, None)
