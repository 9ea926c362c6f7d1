"""The whole step, compiled for GPUs that are not here: one CUDA graph, nothing copied. And how the dumps are read."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from scripts.lab.accounts.compile_step import read_buffers, read_program
from scripts.lab.accounts.process import printed_by
from scripts.lab.accounts.sass import early_uses

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the CUDA plug-in is not installed"
)


# Of a greedy decode step of 8B; `results/2026-11-23-kernels.md` lists them.
LAUNCHES_PER_LAYER = 13
LAUNCHES_AROUND = 25  # one of them copies the host's buffer
# Bytes that 64 rows of 2k read in bfloat16.
READ_OF_HEAD = 128256 * 4096 * 2
READ_OF_LAYER = 436_224_256 + (512 << 20)  # weights, and K/V
FEW_LAYERS = 4  # of steps other than the usual one: each layer is the same code


MOST_MOVING = 8  # commands of a step that refer to the host's buffer or to the output


def compiled(*flags: str) -> dict[str, Any]:
    return printed_by("scripts.lab.accounts.compile_step", *flags)[-1]


def check_moving(result: dict[str, Any]) -> None:
    """No layer refers to a buffer whose address changes: its nodes in the graph would be updated in each step."""
    assert result["moving_kernels"] == []
    assert 1 < result["moving_commands"] <= MOST_MOVING


@needs_plugin
@pytest.mark.targets
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [["--variant", "sample"], ["--drafts", "eagle", "--drafts-only"], ["--max-loras", "4"]],
    ids=["sampled", "drafts", "adapters"],
)
def test_loops_and_branches_are_in_the_graph(flags):
    """Outside of it, the host would wait for the device in each of their passes."""
    result = compiled("--target", "h200", "--layers", "1", "--rows", "8", *flags)
    assert (result["command_buffers"], result["outside"]) == (1, {}), result
    assert result["inside"].get("kWhile", 0) >= (0 if "--max-loras" in flags else 2)
    assert result["kernels"] > 0 == result["spill_bytes"]
    assert result["copies"].get("f32[8,128256]", 0) <= 1  # log-probabilities are of the logits before the changes
    assert result["alias_bytes"] >= result["kv_bytes"]
    check_moving(result)


@needs_plugin
@pytest.mark.targets
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "layers", "kernels_per_layer", "max_temp_mib"),
    [
        ([], 32, 2, 100),  # decode and combine; of the temporaries 31 MiB are the logits
        (["--quantization", "fp8", "--kv-cache-dtype", "fp8"], FEW_LAYERS, 2, 100),
        (["--tokens", "2048"], FEW_LAYERS, 3, 256),  # and prefill; 168 MiB are the MLP's activations
    ],
    ids=["decode", "decode in fp8", "mixed"],
)
def test_an_8b_step_is_one_cuda_graph_and_copies_nothing(flags, layers, kernels_per_layer, max_temp_mib):
    result = compiled("--target", "h200", "--preset", "llama-3.1-8b", "--layers", str(layers), *flags)
    assert (result["layers"], result["command_buffers"]) == (layers, 1)
    assert result["outside"] == {}
    assert result["spill_bytes"] == 0
    assert result["inside"]["kCustomCall"] == layers * kernels_per_layer
    if not flags:
        assert sum(result["inside"].values()) <= layers * LAUNCHES_PER_LAYER + LAUNCHES_AROUND
    # Of the new K/V there is one kernel a layer: rotated, scattered in place, and fused with what comes before.
    assert result["kv_writes"] == layers
    assert result["copies"] == {}
    assert result["copied_arguments"] == []
    assert result["alias_bytes"] >= result["kv_bytes"]
    assert result["temp_bytes"] < max_temp_mib << 20
    check_moving(result)
    read = READ_OF_HEAD + layers * READ_OF_LAYER
    assert result["weights_read"] + result["kv_read"] == pytest.approx(read * (0.5 if "fp8" in flags else 1), rel=0.01)


@needs_plugin
@pytest.mark.targets
@pytest.mark.slow
def test_70b_on_eight_gpus_reduces_twice_a_layer_between_graphs():
    result = compiled("--target", "8xh200", "--preset", "llama-3.1-70b", "--layers", str(FEW_LAYERS))
    # Two a layer; the embedding's, and the greedy token's.
    assert 2 * FEW_LAYERS < result["outside"]["kAllReduce"] <= 2 * FEW_LAYERS + 4
    assert result["inside"]["kCustomCall"] == 2 * FEW_LAYERS
    assert result["spill_bytes"] == 0
    assert "kCustomCall" not in result["outside"]
    assert result["command_buffers"] <= 2 * FEW_LAYERS + 2
    assert result["copies"] == {}
    assert result["copied_arguments"] == []
    assert result["alias_bytes"] >= result["kv_bytes"]
    assert result["temp_bytes"] < 100 << 20
    check_moving(result)


@needs_plugin
@pytest.mark.targets
@pytest.mark.slow
def test_a_step_of_many_rows_is_one_graph_and_its_temporaries_are_the_logits():
    """For `--max-num-seqs` above the default."""
    rows = 1024
    flags = ["--rows", str(rows), "--max-num-seqs", str(rows), "--layers", "2"]
    result = compiled("--target", "h100", "--preset", "llama-3.1-8b", *flags)
    assert (result["command_buffers"], result["outside"]) == (1, {})
    assert (result["spill_bytes"], result["copies"], result["copied_arguments"]) == (0, {}, [])
    assert result["kv_writes"] == 2
    assert result["temp_bytes"] < rows * 128256 * 4 * 1.1
    check_moving(result)


BUFFERS = """\
BufferAssignment:
allocation 0: size 2097152, page 0, parameter 1, shape |bf16[1024,1,1024]| at ShapeIndex {}, maybe-live-out:
 value: <1 w @0> (size=2097152,offset=0): bf16[1024,1,1024]{2,1,0}
allocation 1: size 64, page 0, parameter 0, shape |s32[16]| at ShapeIndex {}:
 value: <2 x @0> (size=64,offset=0): s32[16]{0}
allocation 2: size 6291456, page 0, preallocated-temp:
 value: <3 a @0> (size=4194304,offset=0): f32[1024,1024]{1,0}
 value: <4 b @0> (size=2097152,offset=4194304): bf16[1024,1024]{0,1}
 value: <5 c @0> (size=64,offset=0): s32[16]{0}

Total bytes used: 8388672
"""


def test_a_temporary_with_the_shape_of_a_large_argument_is_a_copy():
    assert read_buffers(BUFFERS) == {
        "largest_temporaries": {"f32[1024,1024]": 4.0, "bf16[1024,1024]": 2.0, "s32[16]": 0.0},
        "copied_arguments": ["bf16[1024,1024]"],
    }


def test_copies_and_kv_writes_of_a_program():
    kv = jax.ShapeDtypeStruct((8, 2), jnp.bfloat16, sharding=SingleDeviceSharding(jax.devices()[0]))
    program = """
      %copy.7 = s32[64,760]{1,0} copy(%bitcast.3.0), metadata={}
      %copy.8 = s32[64,760]{0,1} copy(%x)
      %copy_fusion = bf16[2]{0} fusion(%y), calls=%copied
      %start = (bf16[8]{0}, bf16[8]{0}) copy-start(%z)
      %input_scatter_fusion.2 = bf16[8,2]{1,0} fusion(%kv, %k), kind=kInput
      %input_scatter_fusion.3 = s32[8,2]{1,0} fusion(%slots), kind=kInput
    """
    assert read_program(program, kv) == {"copies": {"s32[64,760]": 2, "bf16[8]": 1}, "kv_writes": 1}


WAIT, VALUES = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "HGMMA.64x128x16.F32.BF16 R56, R8, gdesc[UR4], R56"


CONVERTED = "F2FP.BF16.F32.PACK_AB R11, R57, R56"  # to the last register of the left operand


@pytest.mark.parametrize(
    ("turn", "early"),
    [
        ([VALUES, WAIT, CONVERTED], []),
        ([CONVERTED, VALUES, WAIT], []),
        ([CONVERTED, WAIT, VALUES], [CONVERTED]),  # the left operand of the turn before
        ([VALUES, "FMUL R2, R119, R3", WAIT], ["FMUL R2, R119, R3"]),  # the accumulator's last register
        ([VALUES, "FMUL R2, R120, R3", "LDG.E.64 R6, desc[UR4][R10.64]", "STS [R2], R10", WAIT], []),
        ([VALUES, "LDG.E.64 R7, desc[UR4][R2.64]", WAIT], ["LDG.E.64 R7, desc[UR4][R2.64]"]),  # R7 and R8
        ([VALUES, "SHFL.BFLY PT, R9, R2, 0x1, 0x1f", WAIT], ["SHFL.BFLY PT, R9, R2, 0x1, 0x1f"]),
    ],
)
def test_registers_of_products_under_way_are_left_alone(turn, early):
    code = [".L_x_1:", *map(sass, [*turn, "@P2 BRA `(.L_x_1)", "EXIT"])]
    assert early_uses("\n".join(code)) == early


def sass(text: str) -> str:
    return f"   -:-:-:Y:02        /*0000*/                   {text}"


def test_an_unknown_asynchronous_product_is_an_error():
    with pytest.raises(ValueError, match="not known: which registers are used by 'UTCHMMA"):
        early_uses(
            "\n".join(
                map(sass, ["@P0 UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0", "EXIT"])
            )
        )
