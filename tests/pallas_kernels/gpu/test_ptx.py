"""The kernels' PTX for chips that are not here, executed: right numbers, no hazards, and planted faults are named."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.chips import GPUS
from scripts.lab.ptx import cases, command, machine
from tests.pallas_kernels.gpu.compile_for import OF_CHIP
from tests.pallas_kernels.gpu.ptx_faults import FAULTS
from tests.pallas_kernels.gpu.test_ptx_hopper_machine import UNDEFINED
from tests.pallas_kernels.gpu.test_ptx_machine import HAZARDS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the CUDA plug-in is not installed"
)
README = Path(__file__).parents[3] / "pallas_kernels/README.md"
LEAST_EXECUTED = 0.95  # of each kernel's instructions, in one of the steps
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
@pytest.mark.parametrize("target", command.ALL, ids=" ".join)
def test_a_target_s_kernels_are_right_and_have_no_hazards(target: tuple[str, ...]) -> None:
    """The other steps are for `lab ptx --all`."""
    shapes = [f"--shape={name}" for name in cases.COVERING]
    printed = printed_by("scripts.lab", "ptx", "--target", *target, "--seeds=1", "--unexecuted", *shapes)
    assert re.findall(r"^(.*): nothing found \(\d+ s\)$", printed, re.MULTILINE) == list(cases.COVERING), printed
    most: dict[str, float] = {}
    for name, executed, whole in re.findall(r"^  (paged_\w+): (\d+) of (\d+) instructions$", printed, re.MULTILINE):
        most[name] = max(most.get(name, 0), int(executed) / int(whole))
    assert len(most) == len(cases.FORMS) and min(most.values()) > LEAST_EXECUTED, printed


def test_the_table_of_targets_is_that_of_the_command() -> None:
    rows = re.findall(r"^\| `(\w+(?: --mma-only)?)` \| sm_(\d+)(\d)a? \| `w?g?mma`,", README.read_text(), re.MULTILINE)
    table = {name: (int(major), int(minor)) for name, major, minor in rows}
    assert table == {" ".join(target): GPUS[target[0]].arch for target in command.ALL}
    assert {GPUS[name].arch for name in ("h200", *OF_CHIP)} == {GPUS[name].arch for name in command.TARGETS}  # compiled


def test_every_kind_of_hazard_is_planted() -> None:
    sources = "\n".join(path.read_text() for path in Path(machine.__file__).parent.glob("*.py"))
    kinds = set(re.findall(r'(?:\.report\(\s*|kind, why = )"([a-z. ]+)"', sources))
    of_hopper = {expected.partition(":")[0].replace("\\", "") for _, expected in UNDEFINED.values()}
    assert len(kinds) > 20 and kinds <= of_hopper | {kind for kind, _ in HAZARDS.values()}


def test_all_runs_each_target_in_a_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "ALL", (("a10",),))
    assert command.main(["--all", "--seeds=1", "--shape=an empty step"]) == 0
    assert re.match(r"--target a10\nan empty step: nothing found \(\d+ s\)\n", printed := capsys.readouterr().out)
    assert re.search(r"^\d+ s of CPU time$", printed, re.MULTILINE)
