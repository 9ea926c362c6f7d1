"""The kernels compile for every GPU generation, by the real compilers, without a GPU; what they say is held to caps."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from pallas_kernels.chips import GPUS
from pallas_kernels.gpu import tuning
from tests.pallas_kernels.gpu.compile_for import FEW, OF_CHIP, cases

MAX_REGISTERS = {
    "paged_decode": 208,  # on an A100, whose shared memory holds two CTAs
    "paged_prefill": 168,
    "paged_prefill_mma": 255,
    "paged_combine": 168,
}
# Where there is TMA. The ring has one in the loop over whole blocks and one in the loop over masked blocks; the mma
# prefill has one more between two tiles. Hopper's prefill has one for the cleared tail of V and one for the output; for
# 8-bit pages it has one for converted keys, one for converted values, and one for the output.
PROXY_FENCES = {
    "paged_decode": 2,
    "paged_prefill": 2,
    "paged_prefill_mma": 3,
    "paged_combine": 0,
}
# Of the 34 exponentials of a warp and turn in Hopper's prefill, in the loops over whole and over masked blocks: those
# while the product of the block before with its values and that of the next block's scores are under way. ptxas moves
# some behind the wait where heads are narrow: the weights are converted there, since the product reads their registers.
MIN_OVERLAPPED = {64: 23, 128: 32}  # by head dim
PROXY_FENCES_8_BIT = PROXY_FENCES | {"paged_prefill": 3}


@pytest.mark.targets
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the CUDA plug-in is not installed")
@pytest.mark.parametrize("target", ["h200", *OF_CHIP])
def test_compiles_without_spills_in_place_and_within_the_chip(target: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.gpu.compile_for", target],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    results = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    assert [result["case"] for result in results] == list(cases(target))
    for result in results:
        assert result["alias_bytes"] >= result["kv_bytes"], result
        # Temporaries are the step's own tensors and both kernels' partial results, never a copy of the pages.
        assert result["temp_bytes"] < min(2 * tuning.PARTIAL_RESULTS_BYTES + (32 << 20), result["kv_bytes"]), result
        is_8_bit = result["kv_dtype"] in ("int8", "float8_e4m3fn")
        fences = PROXY_FENCES_8_BIT if is_8_bit else PROXY_FENCES
        names = [kernel["name"] for kernel in result["kernels"]]
        expected = ["paged_combine"] * result["merges"] + ["paged_decode", "paged_prefill"]
        assert sorted(name.removesuffix("_mma") for name in names) == expected
        for kernel in result["kernels"]:
            assert kernel["spill_bytes"] == 0, kernel
            assert kernel["registers"] <= MAX_REGISTERS[kernel["name"]], kernel
            has_tma = GPUS[target].arch >= (9, 0)
            assert kernel["proxy_fences"] == (fences[kernel["name"]] if has_tma else 0), kernel
            assert kernel["unfenced"] == [], kernel
            assert kernel["not_executable"] == [], kernel
            # A pool of serving size has offsets that do not fit 32 bits. TMA takes the page as a coordinate.
            assert (kernel["page_products"] == []) == (has_tma or kernel["name"] == "paged_combine"), kernel
            assert all(line.startswith("mul.wide.") for line in kernel["page_products"]), kernel
            if kernel["name"] == "paged_prefill" and result["case"] in FEW:
                least = MIN_OVERLAPPED[result["head_dim"]]
                assert [loop["overlapped"] >= least for loop in kernel["loops"]] == [True, True], kernel
            assert (kernel["asynchronous_products"] > 0) == (kernel["name"] == "paged_prefill"), kernel
            assert kernel["early_uses"] == [], kernel
            if kernel["name"] in ("paged_decode", "paged_prefill_mma"):  # they clear V in the operand of a product
                pairs, under_one_mask = kernel["pairs_under_one_mask"]
                assert (pairs > 0, under_one_mask) == (True, 0), kernel
            if kernel["name"] == "paged_prefill_mma":  # its results; wgmma's go out by the copy engine
                assert kernel["stores_of_16_bytes"] > 0, kernel
            assert kernel["shared_memory"] <= GPUS[target].shared_memory.per_cta, kernel
            kind = kernel["name"].split("_")[1]
            assert kernel["ctas"] >= result["assumed_ctas"][kind], (kernel, result["assumed_ctas"])
