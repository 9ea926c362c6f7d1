"""What `--attention-backend auto` takes on every chip, where the chip's kernels apply and where they do not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from jax.extend import backend as jax_backend

from batcher.buckets import BucketConfig
from model.execution.memory_plan import RunnerConfig
from model.loading.source import resolve
from pallas_kernels.api import candidates
from pallas_kernels.chips import GPUS, SHARED_MEMORY, TPUS, XLA_READS
from pallas_kernels.spec import Backend
from pallas_kernels.tpu import blocks
from scripts.building.attention_backend import Chosen, choose_attention
from scripts.building.chips import ModelOnChips
from scripts.building.device import KeptFolders
from scripts.building.step_times import attached_chip
from scripts.building.weights import chip_products
from scripts.flags.settings import EngineSettings

# 32 query heads, 8 KV heads of 64 dimensions, which every kernel takes in bfloat16 and in pages of 64 tokens.
MODEL = replace(resolve("preset:llama-3.2-1b", weights=False).config, num_layers=1)
LIMITS = RunnerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=256)
BUCKETS = BucketConfig(max_num_batched_tokens=16, max_num_seqs=2)
# Jetson Orin, Thor, DGX Spark, and what is older than Ampere.
OTHER_ARCHS = [(7, 0), (7, 5), (8, 7), (11, 0), (12, 1)]

GPU_LIMITS = {
    "float32": ({"dtype": "float32"}, r"take bfloat16 or float16: spec\.dtype='float32'"),
    "head_dim 96": ({"head_dim": 96}, r"spec\.head_dim=96"),
    "pages of 48": ({"page_size": 48}, r"spec\.page_size=48"),
    "32 heads for one": ({"num_kv_heads": 1}, r"up to 16 query heads per KV head: group=32"),
}
TPU_LIMITS = {
    "float16": ({"dtype": "float16"}, r"spec\.dtype='float16'"),
    "head_dim 160": ({"head_dim": 160}, r"TPU kernel takes head_dim .*: spec\.head_dim=160"),
    "pages of 4": ({"page_size": 4}, r"TPU kernel takes pages of .* spec\.page_size=4\b"),
    "heads beyond VMEM": (
        {"num_heads": 6000, "num_kv_heads": 1},
        r"6000 query rows|block, not 6000",
    ),
}
CPU_LIMITS = {
    "float16": ({"dtype": "float16"}, "not float16"),
    "head_dim 24": ({"head_dim": 24}, "not 24"),
    "pages of 8": ({"page_size": 8}, "not 8"),
    "128 heads for one": ({"num_heads": 128, "num_kv_heads": 1}, "not 128"),
}
CASES = [
    *[("gpu", chip.arch, *case) for chip in (GPUS["a100"], GPUS["h100"]) for case in GPU_LIMITS.values()],
    *[("gpu", arch, {}, rf"no kernels for GPUs of compute capability {arch[0]}\.{arch[1]}") for arch in OTHER_ARCHS],
    *[("gpu", arch, {"kv_cache_dtype": "fp8"}, "no kernels for GPUs") for arch in OTHER_ARCHS],
    *[("tpu", None, *case) for case in TPU_LIMITS.values()],
    *[("cpu", None, *case) for case in CPU_LIMITS.values()],
]


def attach(monkeypatch: pytest.MonkeyPatch, arch: tuple[int, int]) -> None:
    gpu = SimpleNamespace(core_count=100, compute_capability=f"{arch[0]}.{arch[1]}", device_kind="a GPU")
    monkeypatch.setattr(jax_backend, "get_default_device", lambda: gpu)


def model_on(platform: str, settings: EngineSettings, dtype: str, **more: Any) -> ModelOnChips:
    draft = more.pop("draft", None)
    form = {"dtype": dtype, "quantization": None, "rounding": None, "platform": platform}
    return ModelOnChips(replace(MODEL, **more), 1, settings, LIMITS, draft=draft, **form)


def choose(
    platform: str,
    requested: str = "auto",
    *,
    dtype: str = "bfloat16",
    page_size: int = 64,
    kv_cache_dtype: str = "auto",
    draft: dict[str, Any] | None = None,
    **config: Any,
) -> Chosen:
    """The choice of an engine's start, with which its plan of the memory must agree."""
    settings = EngineSettings(attention_backend=requested, page_size=page_size, kv_cache_dtype=kv_cache_dtype)
    of_draft = None if draft is None else model_on(platform, settings, dtype, **draft)
    model, found = model_on(platform, settings, dtype, draft=of_draft, **config), candidates(requested, platform)
    limits = {"platform": platform, "max_model_len": 256, "folders": KeptFolders()}
    chosen = choose_attention(settings, found, model.attention, BUCKETS, is_here=False, **limits)
    assert model.first_attention() == chosen.attention
    return chosen


@pytest.mark.parametrize(("platform", "arch", "changes", "reason"), CASES)
def test_auto_goes_on_to_the_next_and_a_name_is_an_error(platform, arch, changes, reason, monkeypatch, caplog):
    if arch is not None:
        attach(monkeypatch, arch)
    kernels = [backend for backend in candidates("auto", platform) if backend is not Backend.REFERENCE]
    chosen = choose(platform, **changes)
    assert (chosen.attention.backend, chosen.info.backend) == (Backend.REFERENCE, "reference")
    assert list(chosen.info.failures) == [str(backend) for backend in kernels]
    pattern = pytest.RaisesExc(ValueError, match=reason)
    assert all(pattern.matches(ValueError(failure)) for failure in chosen.info.failures.values())
    warning = chosen.remarks[0]
    assert warning.startswith("WARNING: serving with the attention backend reference, several times slower than ")
    assert all(f"{backend}: {chosen.info.failures[backend]}" in warning for backend in kernels)
    logged = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert logged == [
        f"the attention backend {backend} cannot be used: {chosen.info.failures[backend]}" for backend in kernels
    ]
    for backend in kernels:
        message = (
            f"^--attention-backend {backend} cannot be used here: {backend}: .*{reason}.*; --attention-backend auto"
        )
        with pytest.raises(ValueError, match=message):
            choose(platform, str(backend), **changes)


@pytest.mark.parametrize(
    ("changes", "reason"), [({"head_dim": 96}, "head_dim=96"), ({"page_size": 48}, "page_size=48")]
)
def test_jaxs_kernel_takes_what_the_own_ones_for_tpus_do_not(changes, reason):
    chosen = choose("tpu", **changes)
    assert (chosen.info.backend, list(chosen.info.failures)) == ("tpu-jax", ["tpu"])
    assert reason in chosen.info.failures["tpu"]
    warning = "WARNING: serving with the attention backend tpu-jax, slower than the backend tpu. Not used: tpu: "
    assert chosen.remarks[0].startswith(warning)
    assert choose("tpu", "tpu-jax", **changes).info.failures == {}


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_gpu_of_the_table_serves_with_its_kernels(arch, monkeypatch):
    attach(monkeypatch, arch)
    for changes in ({}, {"head_dim": 128}, {"dtype": "float16", "page_size": 16}, {"kv_cache_dtype": "fp8"}):
        chosen = choose("gpu", **changes)
        assert (chosen.info.backend, chosen.info.failures) == ("gpu", {})
    assert chosen.attention.spec.kv_dtype == ("int8" if arch < (8, 9) else "float8_e4m3fn")


def test_a_plan_for_a_named_backend_that_does_not_apply_is_refused(monkeypatch):
    attach(monkeypatch, (9, 0))
    model = model_on("gpu", EngineSettings(attention_backend="gpu", page_size=64), "float32")
    with pytest.raises(ValueError, match=r"^--attention-backend gpu cannot be used here: gpu: .*spec\.dtype='float32'"):
        model.check_fits()


def test_the_kernels_must_take_the_draft_too(monkeypatch):
    attach(monkeypatch, (9, 0))
    assert choose("gpu", draft={"head_dim": 128}).info.backend == "gpu"
    chosen = choose("gpu", draft={"head_dim": 96})
    assert chosen.info.backend == "reference"
    assert "spec.head_dim=96" in chosen.info.failures["gpu"]


def test_a_tpu_that_is_not_in_the_table_reads_int8_and_is_taken_for_the_one_on_which_drafts_pay_least(monkeypatch):
    """By data sheets a v5p computes 166 FLOP for each byte that it reads; a v5e 240, a tpu7x 312, a v6e 560."""
    monkeypatch.setattr(blocks, "this_chip", lambda: "tpu8t")
    assert chip_products("tpu") == {"reads": XLA_READS, "rounded_rows": {}}
    assert attached_chip("tpu") is TPUS["v5p"]
    monkeypatch.setattr(blocks, "this_chip", lambda: "v6e")
    assert chip_products("tpu") == {"reads": TPUS["v6e"].reads, "rounded_rows": TPUS["v6e"].rounded_rows}
    assert attached_chip("tpu") is TPUS["v6e"]
