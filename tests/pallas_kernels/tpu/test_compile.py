"""The kernels and whole steps compile for TPUs at the Llama shapes, by the real compiler, without a TPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.pallas_kernels.tpu.compile_for import MODELS

TARGETS = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1")
STEPS = [("v6e:1x1", "llama-3.1-8b"), ("v6e:2x4", "llama-3.1-8b"), ("v6e:2x4", "llama-3.1-70b")]
# So that several may run on one machine, and none asks for a metadata server or a chip.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

pytestmark = [
    pytest.mark.targets,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]


def compile_in_a_process_of_its_own(module: str, *arguments: str) -> list[dict]:
    process = subprocess.run(
        [sys.executable, "-m", f"tests.pallas_kernels.tpu.{module}", *arguments],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_update_pages_in_place(target: str) -> None:
    results = compile_in_a_process_of_its_own("compile_for", target)
    assert [(r["model"], r["decode_only"]) for r in results] == [(m, d) for m in MODELS for d in (True, False)]
    for result in results:
        assert result["alias_bytes"] >= result["kv_bytes"], result
        # Temporaries are the step's own tensors in other layouts, never a copy of the pages.
        assert result["temp_bytes"] < 64 << 20 < result["kv_bytes"], result


@pytest.mark.parametrize(("target", "preset"), STEPS)
def test_whole_decode_step_compiles(target: str, preset: str) -> None:
    (result,) = compile_in_a_process_of_its_own("compile_step", target, preset, "64")
    assert result["alias_bytes"] >= result["kv_bytes"], result
    assert result["temp_bytes"] < 256 << 20 < result["kv_bytes"], result
