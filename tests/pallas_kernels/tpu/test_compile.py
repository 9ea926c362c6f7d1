"""The kernels and whole steps compile for TPUs at the Llama shapes, by the real compiler, without a TPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from scripts.lab.accounts.bundles import dump_flags
from scripts.lab.accounts.process import printed_by
from tests.pallas_kernels.tpu.compile_for import shapes

TARGETS = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1")
KERNELS, STEPS = "tests.pallas_kernels.tpu.compile_for", "scripts.lab.accounts.compile_step"
PRODUCTS = "scripts.lab.accounts.compile_tpu_product"
MOST_GLUE_CYCLES = (8_000, 60_000)  # of a layer, by XLA's estimate: in a decode step of 64 rows, in 2,048 tokens
# Cycles by the floor, which is reading K and V once, of the chips of which it is said: results/2026-11-23-kernels.md.
MOST_OF_THE_FLOOR = {
    "drafts 64 x 2k, 4 each": {"v6e:1x1": 1.05, "tpu7x:1x1x1": 1.05},
    "chunk of 64 on 32k": {"v6e:1x1": 1.25, "tpu7x:1x1x1": 2.6},
}
MOST_BUNDLES_PER_PAIR = {"v6e:1x1": 95, "tpu7x:1x1x1": 102}  # of a query and 1,024 tokens, everything included

pytestmark = [
    pytest.mark.targets,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]


def compile_in_a_process_of_its_own(module: str, *arguments: str, flags: str = "") -> list[dict]:
    results = printed_by(module, *arguments, LIBTPU_INIT_ARGS=flags)
    for result in results:
        print(*arguments, json.dumps(result))  # what `pytest -rP` shows
    return results


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit_and_update_pages_in_place(target: str, tmp_path: Path) -> None:
    results = compile_in_a_process_of_its_own(KERNELS, target, str(tmp_path), flags=dump_flags(str(tmp_path)))
    assert [result["shape"] for result in results] == list(shapes(target))
    for result, shape in zip(results, shapes(target).values(), strict=True):
        assert result["alias_bytes"] >= result["kv_bytes"], result
        # Temporaries are the step's own tensors in other layouts, never a copy of the pages.
        assert result["temp_bytes"] < (16 << 20) + 6 * result["operand_bytes"], result
        assert result["temp_bytes"] < result["kv_bytes"], result
        assert len(result["kernels"]) == (1 if shape.decode_only else 2), result
        for kernel in result["kernels"].values():
            # Room for what XLA itself keeps in VMEM, and registers that spill stay few.
            assert kernel["used"] <= kernel["capacity"] * 3 // 4, result
            assert kernel["spilled"] <= 1 << 20, result
            assert kernel["offsets_not_in_granules"] == [], result  # see `test_bundle_facts`
            assert kernel["on_the_first_core"], result  # as `chips.TpuChip.cores` says
        for batch, account in result["batches"].items():
            most = MOST_OF_THE_FLOOR.get(batch, {}).get(target)
            assert most is None or account["of_the_floor"] <= most, result
            if batch == "prefill 2k" and target in MOST_BUNDLES_PER_PAIR:
                assert account["per_pair"] <= MOST_BUNDLES_PER_PAIR[target], result


FORMS = (("auto", "64"), ("int8", "512"), ("auto", "512"), ("int8", "64"))


@pytest.mark.parametrize(("target", "form"), [*zip(TARGETS, FORMS, strict=True)])
def test_whole_steps_with_jaxs_kernel_update_pages_in_place(target: str, form: tuple[str, str]) -> None:
    flags = ("--target", target, "--tensor-parallel-size", "1", "--layers", "2", "--tokens", form[1])
    own = ("--attention", "jax", "--kv-cache-dtype", form[0])
    for result in compile_in_a_process_of_its_own(STEPS, *flags, *own):
        assert result["alias_bytes"] >= result["state_bytes"], result
        assert result["temp_bytes"] <= 64 << 20 < result["kv_bytes"] // 2, result  # the queries in another layout


def test_products_with_4_bit_weights_take_as_long_as_their_weights_are_read(tmp_path: Path) -> None:
    """On a v6e up to 64 rows, and little longer than the matrix units with 512: why it reads int4 in `chips`."""
    flags = dump_flags(str(tmp_path))
    results = compile_in_a_process_of_its_own(PRODUCTS, "v6e:1x1", str(tmp_path), flags=flags)
    assert len(results) == 17
    for result in results:
        assert result["temp_bytes"] == 0, result
        assert result["vmem_used"] <= result["vmem_capacity"] // 2, result
        if result["is_float"]:  # NVFP4 is there for the memory it saves: its numbers take time to decode
            most = 1.35 * result["int8_memory_cycles"] if result["rows"] <= 64 else 1.2 * result["matrix_cycles"]
            assert result["bundles"] <= most, result
            continue
        if result["rows"] <= 64 and result["group"] == 128:
            assert result["bundles"] <= 1.15 * result["memory_cycles"], result
        if result["rows"] <= 64:
            assert result["bundles"] <= 0.8 * result["int8_memory_cycles"], result
        if result["rows"] == 512:
            assert result["bundles"] <= 1.12 * result["matrix_cycles"], result


def test_whole_steps_in_4_bits_write_no_wide_weight() -> None:
    """On one chip and over eight, whose products are split by outputs and by inputs."""
    most = 752_000_000  # bytes of two layers in 4 bits with their scales, and of a head in int8
    for target, num_chips, sizes in (("v6e:1x1", 1, ("64", "512")), ("v6e:2x4", 8, ("64",))):
        flags = ("--target", target, "--layers", "2", "--quantization", "int4")
        for result in compile_in_a_process_of_its_own(STEPS, *flags, *(f"--tokens={size}" for size in sizes)):
            assert result["dequantized_copies"] == {}, result
            assert result["temp_bytes"] <= 16 << 20, result  # the smallest weight takes 32 MiB in bfloat16
            assert result["weights_read"] <= most / num_chips, result


def test_whole_steps_of_all_layers_compile() -> None:
    """70B over eight chips. Other tests compile two or three layers of 8B."""
    flags = ("--target", "v6e:2x4", "--preset", "llama-3.1-70b", "--tokens", "512")
    (result,) = compile_in_a_process_of_its_own(STEPS, *flags)
    assert result["alias_bytes"] >= result["kv_bytes"], result
    assert result["temp_bytes"] < 256 << 20 < result["kv_bytes"], result


def test_steps_copy_neither_activations_nor_weights_nor_pages_and_adapters_cost_a_layer_little() -> None:
    """Between its products and its kernels, a layer has its norms' statistics only. In 8 bits it reads little more than
    half. Eight slots of rank 16 need 4.9 % more arithmetic. In a prompt, the products of gate and up are written and
    read once more, and the second of these two layers, the last one, has little but Q, K and V."""
    flags = ("--target", "v6e:1x1", "--layers", "2")
    sizes = ("--tokens", "64", "--tokens", "2048")
    wide = compile_in_a_process_of_its_own(STEPS, *flags, *sizes)
    in_8_bits = ("--tokens", "2048", "--quantization", "int8", "--kv-cache-dtype", "int8")
    (narrow,) = compile_in_a_process_of_its_own(STEPS, *flags, *in_8_bits)
    for result, most in zip((*wide, narrow), (*MOST_GLUE_CYCLES, MOST_GLUE_CYCLES[1]), strict=True):
        assert result["glue_cycles"] <= most, result
        assert not result["stores_logits"], result
        assert not result["narrows_maxima"], result
    exact = wide[1]
    assert narrow["kv_bytes"] == exact["kv_bytes"] // 2
    assert narrow["alias_bytes"] >= narrow["kv_bytes"], narrow
    # The smallest weight of a layer takes 32 MiB in bfloat16, and its pages more.
    assert narrow["temp_bytes"] <= exact["temp_bytes"] + (8 << 20), (exact, narrow)
    assert narrow["dequantized_copies"] == {}
    read = narrow["weights_read"] + narrow["kv_read"]
    assert read <= 0.55 * (exact["weights_read"] + exact["kv_read"]), (exact, narrow)
    adapted = compile_in_a_process_of_its_own(STEPS, *flags, *sizes, "--max-loras", "8")
    for base, result, most_of_it in zip(wide, adapted, (1.05, 1.13), strict=True):
        cycles = [each["product_cycles"] + each["glue_cycles"] for each in (base, result)]
        assert cycles[1] <= most_of_it * cycles[0], (base, result)
        assert result["alias_bytes"] == base["alias_bytes"]


def test_steps_with_a_head_that_drafts_update_all_pages_in_place() -> None:
    """Those of the model, of the head, and what the head reads of the model. Counted: for each token gained at an
    acceptance of 0.7, three drafts read less than 0.55 of the weights of a plain step of all 32 layers. On a tpu7x,
    whose compiler would copy the head's 849 MiB of weights before its loops."""
    flags = ("--target", "tpu7x:1x1x1", "--tensor-parallel-size", "1", "--layers", "3", "--rows", "8")
    plain, drafts = compile_in_a_process_of_its_own(STEPS, *flags, "--drafts", "eagle3")
    for result in (plain, drafts):
        assert result["alias_bytes"] >= result["state_bytes"], result
        assert result["temp_bytes"] < 16 << 20, result  # the features' pages alone are 512 MiB
    whole = 15_009_849_344  # bytes of an 8B's weights, all but its embedding
    read = whole + drafts["weights_read"] - plain["weights_read"]
    assert read / whole / drafts["tokens"] < 0.55


def test_drawing_after_drafts_takes_no_more_memory_than_drawing_as_many_tokens() -> None:
    (found,) = compile_in_a_process_of_its_own("tests.model.execution.compile_draws", "v6e:1x1")
    assert found["speculative"] <= 1.1 * found["plain"] < 64 << 20, found


def test_adapters_need_no_further_exchange_between_chips() -> None:
    """A product's inputs and those of its adapters are summed over the chips by one all-reduce."""
    flags = ("--target", "v6e:2x4", "--tensor-parallel-size", "8", "--layers", "2", "--tokens", "64")
    plain, adapted = (compile_in_a_process_of_its_own(STEPS, *flags, "--max-loras", n)[0] for n in ("0", "8"))
    assert adapted["exchanges"] == plain["exchanges"]
