"""The messages between the hosts of one engine, in msgpack. Arrays are the bytes of int32 numbers.

The leader's commands have consecutive numbers, which are the same for all followers. A follower fails if a number is
not the next one, because a command was lost or came out of order.
"""

from __future__ import annotations

import msgspec
import numpy as np

from batcher.step import AdapterWrite, Bucket, PenaltyReset, StepInput
from server.engine.wire import ChangeWeights


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """All hosts have arrived."""


class UsePages(msgspec.Struct, tag=True, array_like=True):
    """The number of K/V pages that all hosts use: the smallest number that any host has room for."""

    num_pages: int


class Compile(msgspec.Struct, tag=True, array_like=True):
    """Compile the programs of these buckets, and run none."""

    buckets: list[Bucket]


class Step(msgspec.Struct, tag=True, array_like=True):
    """The fields of a `batcher.step.StepInput`. All arrays are int32."""

    bucket: Bucket
    packed: bytes
    patches: list[bytes]  # arrays of the shape [2, n]
    penalty_resets: list[tuple[int, bytes, bytes]]  # slot, prompt and output
    masks: list[tuple[int, bytes]]  # the number of rows, and an array of the shape [rows, n]
    adapters: list[tuple[int, int]]  # adapter slots and identities


class Recover(msgspec.Struct, tag=True, array_like=True):
    """Recovers from a step that has failed. No step is in flight."""


class HostQuestion(msgspec.Struct, array_like=True, kw_only=True):
    """A command that is answered by an Answer with the same `question`."""

    question: int = 0


class Check(HostQuestion, tag=True, array_like=True):
    """Check whether this change of the weights can be made (`server.engine.weight_changes.Weights.check`)."""

    change: ChangeWeights


class Prepare(HostQuestion, tag=True, array_like=True):
    """Prepare the change that was checked. It can still be undone."""


class Commit(HostQuestion, tag=True, array_like=True):
    """Complete the change, for which all hosts are prepared."""


class Abandon(msgspec.Struct, tag=True, array_like=True):
    """Undo the preparation of a change, because a host has refused it. It has no answer: a failure ends all hosts."""


class LoadAdapter(HostQuestion, tag=True, array_like=True):
    """Read the LoRA adapter in this folder or file while steps go on."""

    path: str


class ForgetAdapter(msgspec.Struct, tag=True, array_like=True):
    """Drop an adapter's weights, which no name and no request uses any more."""

    identity: int


class StageAdapter(HostQuestion, tag=True, array_like=True):
    """Copy an adapter's weights to the chips. No step writes them into a slot before all hosts have answered."""

    identity: int


class UnstageAdapter(msgspec.Struct, tag=True, array_like=True):
    """Drop the staged weights of an adapter, which no step will write into a slot."""

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
    name: str  # the machine's host name
    settings: dict[str, str]  # must be equal on all hosts


class Plan(msgspec.Struct, tag=True, array_like=True):
    """The results of a host's own start."""

    host_id: int
    num_pages: int  # the number of K/V pages that it has room for
    facts: dict[str, str]  # must be equal on all hosts


class Compiled(msgspec.Struct, tag=True, array_like=True):
    """This host has compiled all programs."""

    host_id: int


Found = dict[str, str] | int | None  # facts, of Check; the identity of the weights, of LoadAdapter


class HostReply(msgspec.Struct, tag=True, array_like=True):
    """The answer to a command of the kind Asked."""

    host_id: int
    question: int
    error: str | None = None  # why this host has changed nothing
    found: Found = None


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The follower cannot go on."""

    host_id: int
    reason: str


Report = Hello | Plan | Compiled | HostReply | Failed


def step_to_wire(step: StepInput) -> Step:
    """The message for a step."""
    return Step(
        step.bucket,
        step.packed.tobytes(),
        [patches.tobytes() for patches in step.patches],
        [(reset.slot, _bytes(reset.prompt), _bytes(reset.output)) for reset in step.penalty_resets],
        [(len(masks), masks.tobytes()) for masks in step.masks],
        [(write.slot, write.adapter) for write in step.adapters],
    )


def step_from_wire(step: Step) -> StepInput:
    """The step of a message. Its arrays are read-only."""
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
