"""Other tests, once more as on a CPU with AVX2 only: XLA computes bfloat16 in float32, and C has shorter vectors."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.c_compiler import compiler
from tests.conftest import AS_FOR_USERS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CHOSEN = (
    "tests/pallas_kernels/test_self_test.py",
    "tests/pallas_kernels/tpu/test_self_test.py::test_the_kernels_pass[program0-bfloat16]",
    "tests/pallas_kernels/tpu/test_self_test.py::test_the_kernels_pass[program1-int8]",
    "tests/pallas_kernels/gpu/test_self_test.py::test_both_forms_pass[gpu-interpret-bfloat16]",
    "tests/pallas_kernels/gpu/test_self_test.py::test_both_forms_pass[gpu-mma-interpret-bfloat16]",
    "tests/model/network/test_llama.py::test_bfloat16_stays_near_float32",
    "tests/model/network/test_packed.py::test_packed_weights_give_the_same_logits",
    "tests/model/execution/test_page_copies.py::test_pages_come_back_to_others_bit_for_bit",
    "tests/scripts/test_self_test.py::test_the_c_code_serves_bfloat16",
)


def test_without_avx_512(tmp_path):
    if platform.machine() != "x86_64":
        pytest.skip("AVX is for x86")
    for_haswell = tmp_path / "cc"  # the library's name has a digest of what `--version` says
    for_haswell.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo haswell\nexec {compiler()} "$@" -march=haswell\n')
    for_haswell.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *CHOSEN],
        cwd=ROOT,
        env=os.environ
        | {"XLA_FLAGS": f"{AS_FOR_USERS['XLA_FLAGS']} --xla_cpu_max_isa=AVX2", "COMPILE_AS_FOR_USERS": "1"}
        | {"CC": str(for_haswell)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
