"""Makes a request's embedding from the pooled hidden states of its chunks."""

from __future__ import annotations

import numpy as np

from batcher.request import Pooling
from batcher.scheduling.request_state import RequestState, State
from batcher.scheduling.step_plan import StepPlan
from batcher.step import StepOutput

_LEAST_NORM = 1e-12  # a vector of zeros stays one


def take_pooled(plan: StepPlan, output: StepOutput) -> None:
    """Takes in what the step has of each request that embeds: the sum over its tokens, or its last token's state.

    A request's steps are read in their order. One that was preempted begins again at its first token, and only when
    all its earlier steps have been read.
    """
    assert output.pooled is not None
    for chunk in plan.chunks:
        seq = plan.rows[chunk.row]
        if seq.pooling is None or seq.state is State.FINISHED:
            continue
        pooled = output.pooled[chunk.row]
        if seq.pooling is Pooling.MEAN and chunk.start > 0:
            assert seq.pooled is not None, "a mean begins with the first token"
            seq.pooled += pooled
        else:
            seq.pooled = pooled.copy()


def embedding(seq: RequestState) -> bytes | None:
    """What was pooled, scaled to the length 1: f32[D] in little-endian bytes. None: it is not finite.

    A mean has the direction of its sum.
    """
    assert seq.pooled is not None
    wide = seq.pooled.astype(np.float64)
    if not np.isfinite(wide).all():
        return None
    return (wide / max(np.linalg.norm(wide), _LEAST_NORM)).astype("<f4").tobytes()
