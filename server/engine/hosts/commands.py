"""The messages between the hosts of one engine, in msgpack. Arrays are the bytes of int32 numbers.

All followers receive the leader's commands in the same order. As between an HTTP process and an engine, each Question
has a number, and the Reply with the same number answers it. Failed from the leader means that the engine is dead on all
hosts, and Failed from a follower that it cannot go on.
"""

from __future__ import annotations

import msgspec
import numpy as np

from batcher.step import AdapterWrite, Bucket, PenaltyReset, StepInput, WeightsKind
from server.engine.wire import ChangeWeights, Reply
from server.engine.wire import Failed as Failed
from server.engine.wire import Question as Question
from server.engine.wire import Stop as Stop


class Agree(Question, tag=True):
    """Compare these facts with your own. The answer is the number of K/V pages that the follower has room for."""

    facts: dict[str, str]  # must be equal on all hosts


class UsePages(msgspec.Struct, tag=True):
    """The number of K/V pages that all hosts use: the smallest number that any host has room for."""

    num_pages: int


class Compile(Question, tag=True):
    """Compile the programs of these buckets, and run none."""

    buckets: list[Bucket]


class Step(msgspec.Struct, tag=True):
    """The fields of a `batcher.step.StepInput`. All arrays are int32."""

    bucket: Bucket
    packed: bytes
    patches: list[bytes]  # arrays of the shape [2, n]
    penalty_resets: list[tuple[int, bytes, bytes]]  # slot, prompt and output
    masks: list[tuple[int, bytes]]  # the number of rows, and an array of the shape [rows, n]
    adapters: list[tuple[int, int]]  # adapter slots and identities
    model: int  # the identity of the model of all rows


class Recover(msgspec.Struct, tag=True):
    """Recovers from a step that has failed. No step is in flight."""


class Check(Question, tag=True):
    """Check whether this change of the weights can be made (`server.engine.weight_changes.Weights.check`)."""

    change: ChangeWeights


class Prepare(Question, tag=True):
    """Prepare the change that was checked. It can still be undone."""


class Commit(Question, tag=True):
    """Complete the change, for which all hosts are prepared."""


class Abandon(msgspec.Struct, tag=True):
    """Undo the preparation of a change, because a host has refused it. It has no answer: a failure ends all hosts."""


class Load(Question, tag=True):
    """Find the LoRA adapter or the model in this folder or file while steps go on."""

    kind: WeightsKind
    path: str


class Forget(msgspec.Struct, tag=True):
    """Drop an adapter or a model, which no name and no request uses any more."""

    kind: WeightsKind
    identity: int


class Stage(Question, tag=True):
    """Copy the weights of an adapter or a model to the chips. No step needs them before all hosts have answered. Those
    of a model are brought between two steps, because programs that all chips run must begin in the same order on all
    hosts."""

    kind: WeightsKind
    identity: int


class Unstage(msgspec.Struct, tag=True):
    """Drop the staged weights of an adapter, which no step will write into a slot, or those of a model."""

    kind: WeightsKind
    identity: int


WeightsCommand = Check | Prepare | Commit | Abandon
NamedCommand = Load | Forget | Stage | Unstage
HostQuestion = Agree | Compile | Check | Prepare | Commit | Load | Stage
Command = HostQuestion | UsePages | Step | Recover | WeightsCommand | NamedCommand | Stop | Failed

Found = dict[str, str] | int | None  # facts, of Check; pages, of Agree; the identity of the weights, of Load


class Hello(msgspec.Struct, tag=True):
    """A follower has arrived."""

    name: str  # the machine's host name


class HostReply(Reply, tag=True, kw_only=True):
    """The reply of a follower to a Question."""

    found: Found = None


class HostReport(msgspec.Struct):
    """A message of a follower."""

    host_id: int
    content: Hello | HostReply | Failed


def step_to_wire(step: StepInput) -> Step:
    """The message for a step."""
    return Step(
        step.bucket,
        step.packed.tobytes(),
        [patches.tobytes() for patches in step.patches],
        [(reset.slot, _bytes(reset.prompt), _bytes(reset.output)) for reset in step.penalty_resets],
        [(len(masks), masks.tobytes()) for masks in step.masks],
        [(write.slot, write.adapter) for write in step.adapters],
        step.model,
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
        model=step.model,
    )


def _bytes(array: np.ndarray) -> bytes:
    return np.asarray(array, np.int32).tobytes()


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int32)
