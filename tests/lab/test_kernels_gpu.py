"""The bench of the GPU kernels, with the interpreter in the chip's place: what it checks, computes and prints."""

from __future__ import annotations

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.spec import Backend
from scripts.lab import kernels
from scripts.lab.accounts import static_gpu
from scripts.lab.accounts.specs import make_spec
from scripts.lab.chip import device_gpu, gpu_check, gpu_peers
from scripts.lab.chip.gpu_operands import make_operands

HEADS = (2, 1, 64)
PLAN = device_gpu.Plan(
    variants=[(HEADS, 16, "bfloat16")],
    checked=[[(1, 5), (1, 40)], [(1, 3), (9, 20)]],
    decodes={"64 x 2k": [70, 70], "ragged": [20, 5]},
    prefills={"1 x 8k": [16]},
    short_chunks={"3 on 40": [(3, 40)]},
    layers=2,
    batches=1,
    calls=2,
    copy_bytes=1 << 12,
    product_size=16,
)


@pytest.mark.slow
def test_measuring_goes_through_and_says_what_it_found(tmp_path, capsys):
    figures, lines = device_gpu.measure("h200", "8b", HEADS, backend=Backend.GPU_INTERPRET, plan=PLAN)
    kernels.publish(lines, tmp_path / "report.md")
    assert capsys.readouterr().out.splitlines() == (tmp_path / "report.md").read_text().splitlines() == lines
    written = json.loads(json.dumps(figures))
    assert [len(check["rows"]) for check in written["checks"]] == [2, 2]
    assert all(0 < check["error"] < gpu_check.TOLERANCE for check in written["checks"])
    decode, prefill = written["decode"]["64 x 2k"], written["prefill"]["1 x 8k"]
    ours = decode["ours"]
    assert ours["per_s"] == pytest.approx(140 * 64 * 4 / ours["layer_s"])
    assert ours["share"] == pytest.approx(ours["per_s"] / written["copy_bytes_per_s"])
    assert prefill["ours"]["per_s"] == pytest.approx(16 * 17 * 2 * 2 * 64 / prefill["ours"]["layer_s"])
    for by in (decode, prefill):
        assert by.keys() == {"ours", *gpu_peers.PEERS}
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
    peer = gpu_peers.PEERS[name]
    queries = operands.queries.reshape(len(rows), -1, *operands.queries.shape[1:])
    output = peer.attend(operands, queries, peer.store(operands)).reshape(operands.queries.shape)
    np.testing.assert_allclose(np.asarray(output, np.float32), gpu_check.expected(operands), atol=0.03)


def test_new_keys_are_the_last_of_every_row():
    operands = make_operands(make_spec(HEADS, page_size=16), [(1, 3), (2, 18)], seed=0)
    assert np.array_equal(operands.new(operands.keys), operands.keys[jnp.asarray([2, 19, 20])])
    index, pages, slots = operands.places(with_new=True)
    assert index.tolist() == list(range(21))
    assert slots.tolist() == [0, 1, 2, *range(16), 0, 1]
    assert len(set(pages.tolist())) == 3
    assert 0 not in pages


@pytest.mark.parametrize("what", ["output", "pages"])
def test_a_wrong_result_ends_the_run(monkeypatch, what):
    right = gpu_check.PagedAttention

    class Wrong(right):
        def __call__(self, queries, keys, values, pages, metadata):
            output, pages = super().__call__(queries, keys, values, pages, metadata)
            return (output + 1, pages) if what == "output" else (output, pages.at[0, 0, 0, 0, 0].set(1))

    monkeypatch.setattr(gpu_check, "PagedAttention", Wrong)
    operands = make_operands(make_spec(HEADS, page_size=16), [(1, 5)], seed=0)
    with pytest.raises(SystemExit, match="off by 1" if what == "output" else "changed in the pages"):
        gpu_check.check(Backend.GPU_INTERPRET, operands)


def test_without_a_gpu_measuring_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kernels", "--target", "h200", "--device"])
    with pytest.raises(SystemExit, match="no GPU here"):
        kernels.main()


def test_without_a_disassembler_the_account_says_what_to_install(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="install the package nvidia-cuda-nvdisasm"):
        static_gpu.compile_kernels("h200", (32, 8, 128), "bfloat16", tmp_path, tmp_path)
