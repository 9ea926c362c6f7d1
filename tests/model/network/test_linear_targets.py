"""Quantised products compiled by the chips' own compilers: the kernel is read in place and never written out wide."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from pallas_kernels.chips import GPUS, TPUS
from scripts.lab.accounts.process import printed_by
from tests.model.network.compile_linear import ROWS, SHAPE, forms

TARGETS = ("v5e:1x1", "v6e:1x1", "v5p:1x1x1", "tpu7x:1x1x1", "a100", "l4", "h200", "b200", "rtx5090")

pytestmark = [pytest.mark.targets, pytest.mark.slow]


@pytest.mark.parametrize("target", TARGETS)
def test_no_wide_copy_is_written(target):
    needed = "jax_cuda13_plugin" if target in GPUS else "libtpu"
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: scripts/test --all installs it")
    results = printed_by("tests.model.network.compile_linear", target)
    print(target, *results, sep="\n")  # what `pytest -rP` shows
    chip = GPUS[target] if target in GPUS else TPUS[target.split(":")[0]]
    assert len(results) == len(ROWS) * len(forms(chip))
    dense = {result["rows"]: result for result in results if result["form"] is None}
    for result in results:
        if result["form"] is not None:
            wide = dense[result["rows"]]
            # Rounded inputs, and on GPUs sums in 32 bits, are in memory between kernels. cuBLASLt needs 4 MiB.
            rows = max(16, result["rows"])
            extra = rows * (2 * 4 * SHAPE[0] + 4 * SHAPE[1]) + (4 << 20) if result["rounded"] else 0
            if result["form"].startswith("int4"):  # sums of several parts of the inputs, and of the zeros
                extra = rows * 2 * 4 * SHAPE[0] + (4 << 20)
            assert result["temp_bytes"] <= wide["temp_bytes"] + extra + (1 << 20), result
            assert extra < 2 * SHAPE[0] * SHAPE[1]
            # Of 16 bits a weight, 8 or 12 are saved, less the scales and zeros.
            four_bits = {"int4-g128": 12 - 16 / 128, "int4-g32-zeros": 11, "int4-g16-nvfp4": 11 - 32 / SHAPE[1]}
            bits = four_bits.get(result["form"], 8 - 64 / SHAPE[1])
            assert wide["argument_bytes"] - result["argument_bytes"] >= SHAPE[0] * SHAPE[1] * bits / 8, result


@pytest.mark.parametrize(("target", "form"), [("a100", "int8"), ("h200", "int8"), ("h200", "fp8"), ("h200", "int4"),
                                              ("h200", "int4-g16-nvfp4")])  # fmt: skip
def test_a_whole_decode_step_is_the_one_of_bfloat16(target, form):
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("jax_cuda13_plugin is not installed: scripts/test --all installs it")
    wide, narrow = (compile_step(target, *flags) for flags in ((), ("--quantization", form)))
    for part in ("command_buffers", "outside", "copied_arguments", "copies"):
        assert narrow[part] == wide[part]
    # On the A100 one of nine products is split in two kernels.
    assert sum(narrow["inside"].values()) <= sum(wide["inside"].values()) + 1
    assert narrow["temp_bytes"] <= wide["temp_bytes"] + (1 << 20)
    assert narrow["argument_bytes"] < wide["argument_bytes"]
    assert narrow["dequantized_copies"] == {}


@pytest.mark.parametrize("rows", [1, 64])
def test_a_whole_decode_step_of_fp8_with_rounded_inputs_fits_ada(rows):
    """Where fp8 has no other form, see below. One row is not multiplied as a vector."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("jax_cuda13_plugin is not installed: scripts/test --all installs it")
    step = compile_step("l4", "--quantization", "fp8", "--rounded-rows", "1", "--rounded-head", rows=rows)
    assert step["dequantized_copies"] == {} and step["copied_arguments"] == []
    assert step["command_buffers"] == 1
    assert step["temp_bytes"] < 64 << 20


def test_a_wide_copy_of_a_weight_is_found_where_the_compiler_writes_one():
    """Which is why an L4 gets int8 for `--quantization fp8`."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("jax_cuda13_plugin is not installed: scripts/test --all installs it")
    copies = compile_step("l4", "--quantization", "fp8")["dequantized_copies"]
    assert copies["head.kernel: bf16[128256,4096]"] == 128256 * 4096 * 2
    assert "layers.0.mlp.gate_up.kernel: bf16[28672,4096]" in copies


@cache
def compile_step(target: str, *flags: str, rows: int = 64) -> dict:
    """Of two layers of Llama 3.1 8B. Each is compiled once: several forms are held to the same one of bfloat16."""
    (found,) = printed_by(
        "scripts.lab.accounts.compile_step", "--target", target, "--layers", "2", "--rows", str(rows), *flags
    )
    return found
