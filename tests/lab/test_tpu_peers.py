"""The other implementations that a TPU's kernels are timed next to."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ref_ragged_paged_attention

from scripts.lab.accounts.specs import make_spec
from scripts.lab.chip import gpu_check, tpu_peers
from scripts.lab.chip.gpu_operands import make_operands


@pytest.mark.parametrize(("head_dim", "rows"), [(128, [(1, 70)] * 3), (64, [(20, 20)] * 2)], ids=["decode", "prefill"])
def test_jaxs_kernel_gets_the_pages_in_its_form(head_dim, rows, monkeypatch):
    """By the reference that jax has for its kernel, which itself runs on a TPU only."""
    operands = make_operands(make_spec((4, 2, head_dim), page_size=16), rows, seed=3)
    monkeypatch.setattr(
        "jax.experimental.pallas.ops.tpu.ragged_paged_attention.ragged_paged_attention", ref_ragged_paged_attention
    )
    peer = tpu_peers.PEERS["jax's ragged paged attention"]
    queries = operands.queries.reshape(len(rows), -1, *operands.queries.shape[1:])
    output = peer.attend(operands, queries, peer.store(operands)).reshape(operands.queries.shape)
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(output, np.float32), gpu_check.expected(operands), atol=0.03)
