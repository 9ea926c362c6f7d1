"""The messages between the hosts of one engine: msgpack, and the bytes of int32 arrays.

The leader's commands have numbers without gaps, the same for all followers. A follower that finds another number than
the next one fails: it has lost a command, or two have changed places.
"""

from __future__ import annotations

import msgspec
import numpy as np

from batcher.step import AdapterWrite, Bucket, PenaltyReset, StepInput
from server.engine.wire import ChangeWeights


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """All hosts have arrived."""


class UsePages(msgspec.Struct, tag=True, array_like=True):
    """The number of K/V pages: the least of what the hosts have room for."""

    num_pages: int


class Compile(msgspec.Struct, tag=True, array_like=True):
    """Compile the programs of these buckets, and run none."""

    buckets: list[Bucket]


class Step(msgspec.Struct, tag=True, array_like=True):
    """`batcher.step.StepInput`. All arrays are int32."""

    bucket: Bucket
    packed: bytes
    patches: list[bytes]  # of [2, n] each
    penalty_resets: list[tuple[int, bytes, bytes]]
    masks: list[tuple[int, bytes]]  # rows, and [rows, n]
    adapters: list[tuple[int, int]]  # adapter slots and identities


class Recover(msgspec.Struct, tag=True, array_like=True):
    """A step has failed, and none is in flight."""


class Asked(msgspec.Struct, array_like=True, kw_only=True):
    """A command that an Answer answers, which has its question."""

    question: int = 0


class Check(Asked, tag=True, array_like=True):
    """Find out whether the weights can be changed so. See `server.engine.process`."""

    change: ChangeWeights


class Prepare(Asked, tag=True, array_like=True):
    """Do what can be undone of the change that was checked."""


class Commit(Asked, tag=True, array_like=True):
    """All hosts are prepared: end the change."""


class Abandon(msgspec.Struct, tag=True, array_like=True):
    """A host has refused. One that is prepared undoes that. Not answered: a failure here ends all."""


class LoadAdapter(Asked, tag=True, array_like=True):
    """Read the LoRA adapter in this folder or file. Steps go on."""

    path: str


class ForgetAdapter(msgspec.Struct, tag=True, array_like=True):
    """No name and no request has these weights any more."""

    identity: int


class StageAdapter(Asked, tag=True, array_like=True):
    """Bring these weights to the chips. No step writes them into a slot before all hosts have answered."""

    identity: int


class UnstageAdapter(msgspec.Struct, tag=True, array_like=True):
    """No step will write these weights."""

    identity: int


class Stop(msgspec.Struct, tag=True, array_like=True):
    """The server has been shut down."""


class Fail(msgspec.Struct, tag=True, array_like=True):
    """The engine is dead, on all hosts."""

    reason: str


Question = Check | Prepare | Commit | LoadAdapter | StageAdapter
WeightsCommand = Check | Prepare | Commit | Abandon
AdapterCommand = LoadAdapter | ForgetAdapter | StageAdapter | UnstageAdapter
Command = Welcome | UsePages | Compile | Step | Recover | WeightsCommand | AdapterCommand | Stop | Fail


class Numbered(msgspec.Struct, array_like=True):
    """A command with its number, from 0."""

    number: int
    command: Command


class Hello(msgspec.Struct, tag=True, array_like=True):
    """A follower has arrived."""

    host_id: int
    name: str  # the machine's own
    settings: dict[str, str]  # must be equal on all hosts


class Plan(msgspec.Struct, tag=True, array_like=True):
    """What a host has found out by itself."""

    host_id: int
    num_pages: int  # that it has room for
    facts: dict[str, str]  # must be equal on all hosts


class Compiled(msgspec.Struct, tag=True, array_like=True):
    """All programs are compiled."""

    host_id: int


Found = dict[str, str] | int | None  # facts, of Check; the identity of the weights, of LoadAdapter


class Answer(msgspec.Struct, tag=True, array_like=True):
    """The answer to a command that is Asked."""

    host_id: int
    question: int
    error: str | None = None  # why this host has changed nothing
    found: Found = None


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The follower cannot go on."""

    host_id: int
    reason: str


Report = Hello | Plan | Compiled | Answer | Failed


def step_to_wire(step: StepInput) -> Step:
    """A step as a message."""
    return Step(
        step.bucket,
        step.packed.tobytes(),
        [patches.tobytes() for patches in step.patches],
        [(reset.slot, _bytes(reset.prompt), _bytes(reset.output)) for reset in step.penalty_resets],
        [(len(masks), masks.tobytes()) for masks in step.masks],
        [(write.slot, write.adapter) for write in step.adapters],
    )


def step_from_wire(step: Step) -> StepInput:
    """The step of a message. Its arrays cannot be written to."""
    return StepInput(
        bucket=step.bucket,
        packed=_array(step.packed),
        patches=tuple(_array(patches).reshape(2, -1) for patches in step.patches),
        penalty_resets=tuple(
            PenaltyReset(slot=slot, prompt=_array(prompt), output=_array(output))
            for slot, prompt, output in step.penalty_resets
        ),
        masks=tuple(_array(masks).reshape(rows, -1) for rows, masks in step.masks),
        adapters=tuple(AdapterWrite(slot=slot, adapter=adapter) for slot, adapter in step.adapters),
    )


def _bytes(array: np.ndarray) -> bytes:
    return np.asarray(array, np.int32).tobytes()


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int32)
