"""A step is the same after it has crossed to another host."""

from __future__ import annotations

import msgspec
import numpy as np

from batcher.step import AdapterWrite, Bucket, PenaltyReset, StepInput, Variant
from server.engine.hosts import commands


def test_a_step_arrives_as_it_was_sent():
    step = StepInput(
        bucket=Bucket(16, 4, Variant.SAMPLE, 3),
        packed=np.arange(-3, 200, dtype=np.int32),
        patches=(np.arange(8, dtype=np.int32).reshape(2, 4), np.zeros((2, 4), np.int32)),
        penalty_resets=(PenaltyReset(slot=1, prompt=np.array([5, 6], np.int32), output=np.empty(0, np.int32)),),
        masks=(np.full((16, 3), -1, np.int32),),
        adapters=(AdapterWrite(slot=2, adapter=2**63 - 1), AdapterWrite(slot=1, adapter=5)),
    )
    sent = msgspec.msgpack.encode(commands.step_to_wire(step))
    received = msgspec.msgpack.decode(sent, type=commands.Command)
    assert isinstance(received, commands.Step)
    arrived = commands.step_from_wire(received)
    assert (arrived.bucket, arrived.adapters) == (step.bucket, step.adapters)
    pairs = [(arrived.packed, step.packed)]
    pairs += [*zip(arrived.patches, step.patches, strict=True), *zip(arrived.masks, step.masks, strict=True)]
    (reset,), (sent_reset,) = arrived.penalty_resets, step.penalty_resets
    assert reset.slot == sent_reset.slot
    pairs += [(reset.prompt, sent_reset.prompt), (reset.output, sent_reset.output)]
    for a, b in pairs:
        assert a.dtype == b.dtype == np.int32
        np.testing.assert_array_equal(a, b)
