"""What the engine's start finds in a checkpoint, and what it says of it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
import pytest

from batcher.buckets import BucketConfig, BucketLadder
from model.config import LlamaConfig
from model.loading.source import resolve
from model.loading.stored_weights import StoredWeights, find_weights
from model.quantization.forms import Activations, EightBit, FourBit, MixedForms, Rounding, ScaleFormat, SixBit
from pallas_kernels.chips import CPU_READS, CPU_ROUNDED_ROWS, GPUS, TPUS, XLA_READS
from pallas_kernels.spec import Backend
from scripts.building.chips import choose_kv_dtype
from scripts.building.limits import choose_step_timeout, deferred_programs
from scripts.building.runner import build_runner
from scripts.building.weights import choose_dtype, choose_quantization, choose_rounding
from scripts.convert_checkpoint import convert
from scripts.flags.settings import EngineSettings
from tests.c_compiler import compiler
from tests.conftest import COMPILED
from tests.model import checkpoints
from tests.model.driver import TINY
from tests.model.loaded import flat
from tests.model.loading.test_quantized_checkpoints import write as write_quantized
from tests.model.loading.test_quantized_checkpoints import write_static
from tests.model.quantization.test_checkpoint_form import compressed

INT8, FP8 = EightBit.INT8, EightBit.FP8


def converted(source: Path, folder: Path, dtype: str | None = None) -> Path:
    convert(resolve(str(source)), source, folder, dtype=dtype)
    return folder


def start(folder: Path, phase: str = "load", **settings: object) -> str:
    """The line of an engine's start that tells of the weights, or of another phase."""
    said: list[str] = []
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32, "num_pages": 8}
    asked = EngineSettings(model=str(folder), device="cpu", compile_cache=str(COMPILED), **limits, **settings)
    build_runner(asked, said.append)
    (line,) = (line for line in said if line.startswith(f"  {phase}"))
    return line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("float32", "bfloat16", "tpu", ("bfloat16",)), ("float32", "as asked for")),
        (("auto", "bfloat16", "tpu", ("bfloat16",)), ("bfloat16", "the checkpoint's own")),
        (("auto", "float32", "tpu", ("float32",)), ("float32", "the checkpoint's own")),
        (("auto", "bfloat16", "gpu"), ("bfloat16", "the checkpoint's own")),
        (("auto", "bfloat16", "gpu", ("float32",)), ("bfloat16", "as config.json says; the tensors are float32")),
        (("auto", "float32", "cpu", ("bfloat16",)), ("float32", "as config.json says; the tensors are bfloat16")),
        (
            ("auto", "float16", "gpu", ("float16",)),
            ("bfloat16", "its float16 is rounded to it; --dtype float32 keeps every value"),
        ),
        (
            ("auto", None, "gpu", ("bfloat16", "float32")),
            ("bfloat16", "its bfloat16 and float32 is rounded to it; --dtype float32 keeps every value"),
        ),
        (("auto", None, "gpu"), ("bfloat16", "the checkpoint does not say")),
    ],
)
def test_the_type_to_compute_in_is_chosen_with_a_true_reason(arguments, expected):
    assert choose_dtype(*arguments) == expected


def test_eight_bits_are_chosen_by_what_the_chip_reads():
    def choose(asked, reads_fp8, held=None, is_converted=False, activations=None, rounded_rows=MappingProxyType({})):
        stored = StoredWeights(
            path=Path(),
            is_converted=is_converted,
            config=TINY,
            dtypes=(),
            remark=None,
            quantization=held,
            activations=activations,
        )
        reads = {"int8", "fp8"} if reads_fp8 else {"int8"}
        return choose_quantization(asked, stored, TINY, reads=reads, rounded_rows=rounded_rows)

    assert choose(None, True) == (None, None)
    assert choose("int8", True) == (INT8, "projections and head are int8")
    assert choose("fp8", True) == (FP8, "projections and head are fp8")
    slow = "projections and head are int8, not fp8: this device reads that slowly"
    assert choose("fp8", False) == (INT8, slow)
    assert choose(None, False, FP8) == (INT8, slow + "; the checkpoint holds fp8")
    assert choose(None, True, FP8) == (FP8, "projections and head are fp8; the checkpoint holds fp8")
    assert choose(None, False, INT8, is_converted=True) == (INT8, "projections and head are int8, as converted")
    with pytest.raises(ValueError, match="converted to int8; convert again"):
        choose("fp8", True, INT8, is_converted=True)
    with pytest.raises(ValueError, match="converted to none; convert again"):
        choose("int8", True, None, is_converted=True)
    with pytest.raises(ValueError, match="fp8, which this device reads slowly"):
        choose(None, False, FP8, is_converted=True)
    ada = {"rounded_rows": GPUS["l4"].rounded_rows}
    assert choose("fp8", False, **ada) == (FP8, "projections and head are fp8")
    assert choose(None, False, FP8, activations=Activations.DYNAMIC, **ada)[0] is FP8
    assert choose(None, False, FP8, activations=Activations.EXACT, **ada)[0] is INT8


def test_four_bits_are_kept_or_made_where_the_chip_reads_them():
    config = dataclasses.replace(TINY, hidden_size=256, intermediate_size=640, head_dim=64)
    zeros, plain = FourBit(group=128, has_zeros=True), FourBit(group=128)

    def choose(asked, reads_int4, **held):
        stored = StoredWeights(path=Path(), config=config, dtypes=(), remark=None, **{"is_converted": False} | held)
        reads = {"int8", "fp8", *(["int4"] if reads_int4 else [])}
        return choose_quantization(asked, stored, config, reads=reads, rounded_rows=MappingProxyType({}))

    awq = {"quantization": INT8, "packing": "AWQ int4", "activations": Activations.EXACT}
    fits, not_fit = awq | {"four_bit": zeros}, awq | {"four_bit_fault": "its groups are odd"}
    kept = "projections are int4, groups of 128 with zero points, and the head is int8"
    int8, fp8 = (f"AWQ int4 checkpoint, requantised: projections and head are {form}" for form in ("int8", "fp8"))
    assert choose(None, True, **fits) == choose("int4", True, **fits) == (zeros, f"AWQ int4 checkpoint, kept: {kept}")
    assert choose(None, False, **fits) == (INT8, int8)
    assert choose("int4", False, **fits) == (INT8, f"{int8}, not int4: this device reads that slowly")
    assert choose("int8", True, **fits) == (INT8, int8)
    assert choose("fp8", True, **fits) == (FP8, fp8)
    odd = ", not kept in 4 bits: its groups are odd"
    assert choose(None, True, **not_fit) == (INT8, int8 + odd)
    int4 = "projections are int4, groups of 128, and the head is int8"
    assert choose("int4", True, **not_fit) == (plain, f"AWQ int4 checkpoint, requantised: {int4}{odd}")
    rounded = f"{int4}, each weight rounded to nearest"
    assert choose("int4", True) == (plain, rounded)
    assert choose("int4", True, quantization=FP8) == (plain, rounded + "; the checkpoint holds fp8")
    assert choose("int4", False) == (INT8, "projections and head are int8, not int4: this device reads that slowly")
    converted = {"quantization": zeros, "is_converted": True}
    as_converted = f"{kept}, as converted"
    assert choose(None, True, **converted) == choose("int4", True, **converted) == (zeros, as_converted)
    with pytest.raises(ValueError, match=r"converted to int4, .* convert again with --quantization int8"):
        choose(None, False, **converted)
    with pytest.raises(ValueError, match=r"converted to int4-g128-zeros; convert again"):
        choose("int8", True, **converted)
    assert choose_rounding(zeros, None, reads={"int8", "int4"}, rounded_rows={"int8": 1}) == (None, None)
    assert all("int4" in chip.reads for chip in GPUS.values())
    assert [chip.name for chip in TPUS.values() if "int4" in chip.reads] == ["v6e"]


def test_a_cpu_keeps_the_numbers_of_four_bits_as_they_are_stored():
    config = dataclasses.replace(TINY, hidden_size=256, intermediate_size=640, head_dim=64)
    rounded, exact = FourBit(group=128, has_zeros=True), FourBit(group=128, numbers=ScaleFormat.FLOAT16, has_zeros=True)
    blocks, finer = (
        FourBit(group=32, numbers=ScaleFormat.Q4_1),
        MixedForms(most=exact, others=(("layers.0.mlp.down", INT8),)),
    )

    def choose(asked, reads=CPU_READS, rounded_rows=CPU_ROUNDED_ROWS, **held):
        stored = StoredWeights(
            path=Path(), is_converted=False, config=config, dtypes=(), remark=None, quantization=INT8, **held
        )
        form, said = choose_quantization(asked, stored, config, reads=reads, rounded_rows=rounded_rows)
        return form, *choose_rounding(form, stored, reads=reads, rounded_rows=rounded_rows), said

    awq = {"packing": "AWQ int4", "activations": Activations.EXACT, "four_bit": rounded, "exact_form": exact}
    said = "AWQ int4 checkpoint, kept: projections are int4, groups of 128 with float16 scales and zero points, and"
    assert choose(None, **awq) == choose("int4", **awq) == (exact, None, None, f"{said} the head is int8")
    assert choose("int8", **awq)[:3] == choose(None, XLA_READS, {}, **awq)[:3] == (INT8, None, None)
    assert choose(None, GPUS["h100"].reads, GPUS["h100"].rounded_rows, **awq)[:3] == (rounded, None, None)
    gguf = {"packing": "GGUF Q4_1", "activations": Activations.BLOCKS}
    with_head, said = Rounding(with_head=True), "inputs of projections and of the head are rounded to int8, too, each "
    in_blocks, of_tokens = said + "block of a token with its own scale", said + "token with its own scale"
    for form in (blocks, finer, SixBit(), MixedForms(most=SixBit(), others=(("head", INT8),))):
        kept = gguf | {"exact_form": form, "four_bit_fault": "its types differ"}
        assert choose(None, **kept)[:3] == choose(form.kind, **kept)[:3] == (form, with_head, in_blocks)
        assert choose("int8", **kept)[:3] == (INT8, with_head, of_tokens)
        assert choose(None, XLA_READS, {}, **kept)[:3] == (INT8, None, None)
        assert choose(None, GPUS["h100"].reads, GPUS["h100"].rounded_rows, **kept)[:3] == (INT8, None, None)
        assert choose(None, TPUS["v5e"].reads, TPUS["v5e"].rounded_rows, **kept)[:3] == (INT8, None, None)
    form, _ = choose_quantization("int4", None, config, reads=CPU_READS, rounded_rows=CPU_ROUNDED_ROWS)
    rounding, _ = choose_rounding(form, None, reads=CPU_READS, rounded_rows=CPU_ROUNDED_ROWS)
    assert (form, rounding) == (FourBit(group=128), Rounding())
    small = {name: dataclasses.replace(awq[name], group=16) for name in ("four_bit", "exact_form")}
    assert choose(None, **awq | small)[0] is INT8  # there is no product in C
    assert choose(None, GPUS["h100"].reads, {}, **awq | small)[0] == small["four_bit"]
    floats = FourBit(group=16, numbers=ScaleFormat.NVFP4)
    nvfp4 = {"packing": "ModelOpt NVFP4", "activations": Activations.EXACT} | dict.fromkeys(small, floats)
    for chip in (*GPUS.values(), TPUS["v6e"]):
        assert choose(None, chip.reads, chip.rounded_rows, **nvfp4)[:3] == (floats, None, None)
        assert choose("int4", chip.reads, chip.rounded_rows, **nvfp4)[:3] == (floats, None, None)
    assert choose(None, **nvfp4)[0] is choose(None, TPUS["v5e"].reads, {}, **nvfp4)[0] is INT8


def test_inputs_are_rounded_as_the_checkpoint_says_or_where_the_chip_gains():
    def choose(form, chip, activations=None, held=None):
        stored = StoredWeights(
            path=Path(), is_converted=False, config=TINY, dtypes=(), remark=None, quantization=held or form,
            activations=activations,
        )  # fmt: skip
        return choose_rounding(form, stored, reads=chip.reads, rounded_rows=chip.rounded_rows)

    a100, l4, h200, v5e = GPUS["a100"], GPUS["l4"], GPUS["h200"], TPUS["v5e"]
    assert choose(None, v5e) == choose(FP8, a100) == choose(INT8, v5e, Activations.EXACT) == (None, None)
    own = "inputs of projections are rounded to {}, too, each token with its own scale"
    assert choose(INT8, v5e) == (Rounding(), own.format("int8"))
    assert choose(FP8, h200) == (Rounding(min_rows=256), own.format("fp8") + " in steps of 256 tokens or more")
    assert choose(FP8, h200, Activations.DYNAMIC) == (Rounding(), own.format("fp8"))
    assert choose(FP8, l4) == (
        Rounding(with_head=True),
        own.replace("projections", "projections and of the head").format("fp8"),
    )
    stored = "inputs of projections are rounded to fp8, too, with the checkpoint's scales"
    assert choose(FP8, h200, Activations.STATIC) == (Rounding(is_static=True), stored)
    assert choose(INT8, v5e, Activations.STATIC, held=FP8) == (Rounding(), own.format("int8"))


@pytest.mark.parametrize("activations", ["dynamic", "static", None])
def test_a_cpu_with_a_compiler_computes_int8_checkpoints_as_they_are_written(activations, tmp_path, monkeypatch):
    """Without a compiler, and if only the weights are quantised, inputs keep their type."""
    compiler()
    if activations == "static":
        write_static(tmp_path, INT8.dtype)
    else:
        config = compressed("int-quantized", type="int")
        if activations is None:
            config["config_groups"]["group_0"]["input_activations"] = None
        write_quantized(tmp_path, "channel", INT8.dtype, quantization=config)
    rounded = "inputs of projections are rounded to int8, too, "
    scales = {"dynamic": "each token with its own scale", "static": "with the checkpoint's scales"}
    line = start(tmp_path)
    assert (rounded + scales[activations] in line) if activations else ("rounded" not in line)
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert rounded not in start(tmp_path)


def test_8_bits_of_kv_are_fp8_where_a_gpu_converts_it_and_int8_elsewhere():
    assert choose_kv_dtype("auto", "bfloat16", Backend.GPU) == ("bfloat16", None)
    assert choose_kv_dtype("int8", "bfloat16", Backend.TPU) == ("int8", None)
    for asked in ("fp8", "fp8_e4m3"):
        remark = f"not {asked}: int8 is the 8-bit type of the tpu attention"
        assert choose_kv_dtype(asked, "bfloat16", Backend.TPU) == ("int8", remark)
        assert choose_kv_dtype(asked, "bfloat16", Backend.GPU, (8, 9)) == ("float8_e4m3fn", None)
        remark = f"not {asked}: this GPU has no instruction that converts fp8"
        assert choose_kv_dtype(asked, "bfloat16", Backend.GPU, (8, 0)) == ("int8", remark)
    assert choose_kv_dtype("int8", "bfloat16", Backend.GPU, (9, 0)) == ("int8", None)
    assert choose_kv_dtype("fp8", "bfloat16", Backend.GPU_INTERPRET) == ("float8_e4m3fn", None)


@pytest.mark.parametrize(
    ("asked", "platform", "seconds"),
    [(None, "cpu", None), (None, "tpu", 30.0), (None, "gpu", 30.0), (0.0, "gpu", None), (5.0, "cpu", 5.0)],
)
def test_a_chip_counts_as_stuck_after_some_time_and_a_cpu_never(asked, platform, seconds):
    assert choose_step_timeout(asked, platform) == seconds


def test_only_a_cpu_defers_programs():
    """On a GPU, loading one discards the graphs of all others."""
    ladder = BucketLadder(BucketConfig(max_num_seqs=8, max_num_batched_tokens=64))
    of_cpu = deferred_programs(ladder, "cpu", all_first=False, num_hosts=1)
    assert {*of_cpu, *ladder.needed_first()} == set(ladder.buckets()) != set(of_cpu) != set()
    assert [deferred_programs(ladder, chip, all_first=False, num_hosts=1) for chip in ("gpu", "tpu")] == [(), ()]


def test_the_scales_of_kv_come_from_the_checkpoint_or_are_measured(tmp_path):
    folder = checkpoints.write(tmp_path / "hf", "gqa2")
    measured = "K/V in int8, with scales measured on fixed tokens"
    assert start(folder, "scales", kv_cache_dtype="int8").endswith(measured)
    given = {f"model.layers.{i}.self_attn.{x}_scale": np.ones(1, np.float32) / 64 for i in range(3) for x in "kv"}
    checkpoints.write_tensors(folder, checkpoints.tensors("gqa2") | given)
    own = "K/V in int8, not fp8: int8 is the 8-bit type of the (cpu|reference) attention, with the checkpoint's scales$"
    assert re.search(own, start(folder, "scales", kv_cache_dtype="fp8"))
    assert start(folder, "scales", kv_cache_dtype="int8", calculate_kv_scales=True).endswith(measured)
    assert re.search(own, start(converted(folder, tmp_path / "out"), "scales", kv_cache_dtype="fp8"))
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32, "num_pages": 8}
    settings = EngineSettings(
        model=str(folder), device="cpu", kv_cache_dtype="int8", compile_cache=str(COMPILED), **limits
    )
    config = build_runner(settings, lambda line: None).info.cache_config
    assert config["cache_dtype"] == "int8"
    assert int(config["kv_cache_size_tokens"]) == 8 * int(config["page_size"])
    assert float(config["kv_cache_max_concurrency"]) == int(config["kv_cache_size_tokens"]) / 32


def test_a_quantised_checkpoint_starts_and_is_converted_as_it_would_start(tmp_path):
    write_quantized(tmp_path / "fp8", "channel", FP8.dtype)
    assert "projections and head are int8, not fp8" in start(tmp_path / "fp8")
    convert(resolve(str(tmp_path / "fp8")), tmp_path / "fp8", tmp_path / "out", dtype=None,
            quantization="int8")  # fmt: skip
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert "projections and head are int8, as converted" in start(tmp_path / "out")


def test_the_type_that_was_stored_is_announced_not_what_the_config_says(tmp_path):
    source = checkpoints.write(tmp_path / "hf", "gqa2")
    converted(source, tmp_path / "out", dtype="bfloat16")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["torch_dtype"] == "bfloat16"
    (tmp_path / "out" / "config.json").write_text(json.dumps(raw | {"torch_dtype": "float32"}))
    found = find_weights(tmp_path / "out", LlamaConfig.from_file(tmp_path / "out"))
    assert found.config.checkpoint_dtype == "bfloat16"
    assert "the CPU's default" in start(tmp_path / "out")


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_head_of_its_own_under_a_tied_config_is_planned_for_used_and_announced(is_converted, tmp_path):
    folder = checkpoints.write(tmp_path / "hf", "gqa2")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    if is_converted:
        converted(folder, tmp_path / "out")
        folder = tmp_path / "out"
    found = find_weights(folder, LlamaConfig.from_file(folder))
    assert not found.config.tie_word_embeddings
    head = flat(found.load(dtype=jnp.float32))["head.kernel"]
    np.testing.assert_array_equal(head, checkpoints.tensors("gqa2")["lm_head.weight"])
    line = start(folder)  # its runner was planned for that head: it takes the weights
    assert ("lm_head.weight differs from the embedding and is used" in line) is not is_converted
