"""Verdicts of self-tests that later starts find, and what makes a start test again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import pallas_kernels
from scripts.building import attention_backend, kept_verdict
from scripts.building.kept_verdict import KeptVerdict
from scripts.building.runner import build_runner
from scripts.flags.settings import EngineSettings
from tests.c_compiler import compiler
from tests.model import checkpoints
from tests.scripts.faulty_backends import Faultless, NoNumbers, choose

KEPT, ALWAYS, NEVER = (EngineSettings(device="cpu", self_test=when) for when in ("kept", "always", "never"))
NOT_A_NUMBER = "is wrong: not a number"
compute = Faultless.__call__


@pytest.fixture
def passed(tmp_path, monkeypatch) -> Path:
    """A folder with the verdict of kernels that have passed, and are broken now."""
    folder = tmp_path / "programs"
    chosen = choose(Faultless, KEPT, folder=folder)
    assert (chosen.info.self_test, len(verdicts(folder))) == ("passed", 1)
    monkeypatch.setattr(Faultless, "__call__", without_numbers)
    return folder


def without_numbers(self: Faultless, *arguments: Any, **options: Any) -> Any:
    output, pages = compute(self, *arguments, **options)
    return output * float("nan"), pages


def verdicts(folder: Path) -> list[Path]:
    return [*folder.glob("self_tests/*")]


def test_kernels_that_have_passed_are_not_tested_again(passed):
    chosen = choose(Faultless, KEPT, folder=passed)
    assert (chosen.info.self_test, chosen.info.failures) == ("passed (kept)", {})
    (remark,) = chosen.remarks
    assert remark.startswith("attention backend gpu agrees with float32 within ")
    assert remark.endswith(", at an earlier start")


def test_always_tests_again_and_a_failure_drops_the_verdict(passed):
    for settings in (ALWAYS, KEPT):
        with pytest.raises(ValueError, match=NOT_A_NUMBER):
            choose(Faultless, settings, folder=passed)
        assert verdicts(passed) == []


def test_a_failure_is_not_kept(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Faultless, "__call__", without_numbers)
        with pytest.raises(ValueError, match=NOT_A_NUMBER):
            choose(Faultless, KEPT, folder=tmp_path)
    assert verdicts(tmp_path) == []
    assert choose(Faultless, KEPT, folder=tmp_path).info.self_test == "passed"


def test_never_warns_in_the_report_and_in_the_log(caplog):
    chosen = choose(NoNumbers, NEVER)
    assert chosen.info.self_test == "not run: --self-test never"
    warned = "the attention backend gpu is not tested: --self-test never; wrong numbers would be served"
    assert chosen.remarks == (f"WARNING: {warned}",)
    assert warned in caplog.messages


def other_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = tmp_path / "pallas_kernels"
    shutil.copytree(Path(pallas_kernels.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "gpu/decode.py").write_text("# another kernel")
    monkeypatch.setattr(pallas_kernels, "__file__", str(copy / "__init__.py"))


def other_options(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(kept_verdict, "compiler_options", lambda platform: {"xla_cpu_enable_fast_math": False})


CHANGES = {
    "the kernels' code": other_code,
    "jax": lambda monkeypatch, _: monkeypatch.setattr(jax, "__version__", "0.0.1"),
    "the compiler": lambda monkeypatch, _: monkeypatch.setattr(
        "model.compiling.program.compiler_of", lambda device: "another"
    ),
    "the chips": lambda monkeypatch, _: monkeypatch.setattr(
        "model.compiling.program_store.topology", lambda: "another chip"
    ),
    "the compiler's options": other_options,
    "the C code": lambda monkeypatch, _: monkeypatch.setattr(kept_verdict.library, "content_digest", lambda: "other"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_fact_makes_the_start_test_again(
    passed, change: Callable[[pytest.MonkeyPatch, Path], None], tmp_path, monkeypatch
):
    change(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=NOT_A_NUMBER):
        choose(Faultless, KEPT, folder=passed)


@pytest.mark.parametrize("shapes", [{"query_heads": 8}, {"max_model_len": 64}], ids=str)
def test_other_shapes_are_tested_again(passed, shapes):
    with pytest.raises(ValueError, match=NOT_A_NUMBER):
        choose(Faultless, KEPT, folder=passed, **shapes)


def test_a_damaged_verdict_is_no_verdict(passed):
    (path,) = verdicts(passed)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=NOT_A_NUMBER):
        choose(Faultless, KEPT, folder=passed)


def test_the_driver_of_a_gpu_counts(tmp_path, monkeypatch):
    driver = tmp_path / "version"
    monkeypatch.setattr(kept_verdict, "NVIDIA_DRIVER", driver)

    def found() -> str | None:
        return KeptVerdict(["a shape"], "gpu", tmp_path).read()

    driver.write_text("NVRM version: 580.65")
    KeptVerdict(["a shape"], "gpu", tmp_path).write("passes")
    assert found() == "passes"
    driver.write_text("NVRM version: 590.11")
    assert found() is None
    driver.unlink()  # its version is unknown: nothing is kept
    KeptVerdict(["a shape"], "gpu", tmp_path).write("passes")
    assert found() is None


@pytest.mark.slow
def test_a_second_start_on_this_machine_does_not_test_the_c_code(tmp_path, monkeypatch):
    compiler()
    model = checkpoints.write(tmp_path / "model", "gqa2")
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 2, "max_model_len": 32, "num_pages": 8}
    settings = EngineSettings(model=str(model), device="cpu", compile_cache=str(tmp_path / "programs"), **limits)
    assert build_runner(settings, print).info.attention.self_test == "passed"
    monkeypatch.delattr(attention_backend.SelfTest, "run")
    assert build_runner(settings, print).info.attention.self_test == "passed (kept)"
