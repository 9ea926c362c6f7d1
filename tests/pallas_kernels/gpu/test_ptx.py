"""The kernels' PTX for chips that are not here, executed: right numbers, no hazards, and planted faults are named."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from scripts.lab.ptx import cases
from tests.pallas_kernels.gpu.ptx_faults import FAULTS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the CUDA plug-in is not installed"
)
ALWAYS = ("none, a padding tile", "one mask for a pair", "no wait")


def printed_by(module: str, *arguments: str) -> str:
    """A process executes kernels of one target only."""
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert process.returncode in (0, 1), process.stderr[-4000:]
    return process.stdout


def check_reports(target: str, names: list[str]) -> None:
    lines = printed_by("tests.pallas_kernels.gpu.ptx_faults", target, *names).splitlines()
    reports = [json.loads(line) for line in lines]
    assert [report["name"] for report in reports] == names
    for report in reports:
        expected = FAULTS[target][report["name"]].expected
        if expected:
            assert re.search(expected, report["findings"]), report
        else:
            assert not report["findings"], report


def test_what_an_a100_executes() -> None:
    check_reports("a100", list(ALWAYS))


@pytest.mark.slow
@pytest.mark.targets
@pytest.mark.parametrize("target", FAULTS)
def test_planted_faults_are_named(target: str) -> None:
    check_reports(target, [name for name in FAULTS[target] if target != "a100" or name not in ALWAYS])


@pytest.mark.slow
@pytest.mark.targets
@pytest.mark.parametrize("target", ["a100", "l4", "h100", "b200", "b300", "rtx5090"])
def test_every_step_is_right_and_has_no_hazards(target: str) -> None:
    printed = printed_by("scripts.lab", "ptx", "--target", target, "--seeds", "1")
    assert len(re.findall(r"^.*: nothing found \(\d+ s\)$", printed, re.MULTILINE)) == len(cases.SHAPES), printed
