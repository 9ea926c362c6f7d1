"""The bench of the GPU kernels, with the interpreter in the chip's place: what it checks, computes and prints."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.api import PagedAttention
from pallas_kernels.self_test import TOLERANCE
from pallas_kernels.spec import Backend
from scripts.lab import kernels
from scripts.lab.accounts.specs import make_spec
from scripts.lab.chip import speed
from scripts.lab.chip.kernels import TINY
from scripts.lab.chip.operands import make_operands
from scripts.lab.chip.peers import GPU_PEERS, TPU_PEERS
from tests.pallas_kernels.tpu.interpreted import jaxs_kernel

HEADS = (2, 1, 64)
PLAN = speed.Plan(
    variants=[(HEADS, 16, "bfloat16")],
    sizes=TINY,
    shapes={
        "decode": {"64 x 2k": [(1, 70), (1, 70)], "ragged": [(1, 20), (1, 5)]},
        "prefill": {"1 x 8k": [(16, 16)]},
        "short chunks": {"3 on 40": [(3, 40)]},
    },
    layers=2,
    batches=1,
    calls=2,
    copy_bytes=1 << 12,
    product_size=16,
)


@pytest.mark.slow
def test_measuring_goes_through_and_says_what_it_found(tmp_path, capsys):
    lines: list[str] = []
    figures = speed.measure("h200", HEADS, backend=Backend.GPU_INTERPRET, plan=PLAN, say=lines.append)
    kernels.publish(lines, tmp_path / "report.md")
    assert capsys.readouterr().out.splitlines() == (tmp_path / "report.md").read_text().splitlines() == lines
    written = json.loads(json.dumps(figures))
    (check,) = written["checks"]
    assert (check["heads"], check["page_size"], check["dtype"]) == (list(HEADS), 16, "bfloat16")
    assert 0 < check["largest_error"] < TOLERANCE
    decode, prefill = written["decode"]["64 x 2k"], written["prefill"]["1 x 8k"]
    ours = decode["ours"]
    assert ours["per_s"] == pytest.approx(140 * 64 * 4 / ours["layer_s"])
    assert ours["share"] == pytest.approx(ours["per_s"] / written["copy_bytes_per_s"])
    assert prefill["ours"]["per_s"] == pytest.approx(16 * 17 * 2 * 2 * 64 / prefill["ours"]["layer_s"])
    for by in (decode, prefill):
        assert by.keys() == {"ours", *GPU_PEERS}
        assert "layer_s" in by["gather everything"]
        assert "layer_s" in by["jax.nn, xla, contiguous"]
        assert by["jax.nn, cudnn, contiguous"]["missing"]  # there is no cuDNN on a CPU, and the run goes on
        assert by["cudnn, paged"]["missing"]
    assert written["decode"]["ragged"]["gather everything"] == {"missing": "rows of different lengths"}
    assert sum("| 64 x 2k | ours |" in line and line.endswith("| 85% |") for line in lines) == 1
    short = written["short chunks"]["3 on 40"]["ours"]
    assert short["share"] == pytest.approx(40 * 64 * 4 / short["layer_s"] / written["copy_bytes_per_s"])
    # Prediction and measurement stand next to each other.
    measured, predicted = (short[key] * 1e6 for key in ("layer_s", "predicted_s"))
    assert sum(f"| 3 on 40 | ours | {measured:.1f} | {predicted:.1f} |" in line for line in lines) == 1


@pytest.mark.parametrize("rows", [[(1, 70)] * 3, [(20, 20)] * 2], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", ["gather everything", "jax.nn, xla, contiguous"])
def test_peers_compute_the_same_attention(name, rows):
    operands = make_operands(make_spec((4, 2, 64), page_size=16), rows, seed=3)
    peer = GPU_PEERS[name]
    queries = operands.queries.reshape(len(rows), -1, *operands.queries.shape[1:])
    output = peer.attend(operands, queries, peer.store(operands)).reshape(operands.queries.shape)
    np.testing.assert_allclose(np.asarray(output, np.float32), operands.expected(), atol=0.03)


def test_a_wrong_result_ends_the_run_before_the_timings(monkeypatch):
    right = PagedAttention.__call__

    def wrong(self, *arguments, **options):
        output, pages = right(self, *arguments, **options)
        return output + 1, pages

    monkeypatch.setattr(PagedAttention, "__call__", wrong)
    with pytest.raises(SystemExit, match=r"WRONG: .*num_query_heads=2.*is wrong: off by"):
        speed.measure("h200", HEADS, backend=Backend.REFERENCE, plan=PLAN, say=lambda line: None)


@pytest.mark.parametrize(("head_dim", "rows"), [(128, [(1, 70)] * 3), (64, [(20, 20)] * 2)], ids=["decode", "prefill"])
def test_jaxs_kernel_for_tpus_gets_the_pages_in_its_form(head_dim, rows):
    operands = make_operands(make_spec((4, 2, head_dim), page_size=16), rows, seed=3)
    peer = TPU_PEERS["jax's ragged paged attention"]
    queries = operands.queries.reshape(len(rows), -1, *operands.queries.shape[1:])
    with jaxs_kernel():
        output = peer.attend(operands, queries, peer.store(operands)).reshape(operands.queries.shape)
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(output, np.float32), operands.expected(), atol=0.03)
