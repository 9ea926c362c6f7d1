"""The planner's arithmetic, against numbers that anyone can work out."""

import re

import pytest
from safetensors.numpy import load_file

from model.loading.source import DEMO_FOLDER
from scripts.lab import plan
from scripts.lab.planning import report as planning_report
from tests.model import checkpoints


def gib(report: str, part: str) -> float:
    return float(re.search(rf"([\d.]+) GiB  {part}", report)[1])


def report_of(capsys, *flags: str) -> str:
    assert plan.main([*flags, "--no-compile"]) == 0
    return capsys.readouterr().out


def test_8b_on_one_v6e_by_hand(capsys):
    report = report_of(
        capsys, "--model", "preset:llama-3.1-8b", "--target", "v6e", "--max-model-len", "8192", "--num-pages", "600"
    )
    assert gib(report, "weights") == pytest.approx(8_030_261_248 * 2 / 2**30, abs=0.01)
    # 32 layers, K and V, 8 heads of 128 in bf16: 128 KiB a token
    assert gib(report, "K/V") == pytest.approx(601 * 128 * 128 / 2**20, abs=0.01)
    assert "room for 76800 tokens: 9 requests of 8192 at once" in report


def test_a_head_that_the_files_hold_counts_although_the_config_ties_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(planning_report, "GIB", 1)  # the report is in bytes then
    flags = ("--model", str(tmp_path), "--device-memory", "1e9")
    given = load_file(DEMO_FOLDER / "model.safetensors")
    (tmp_path / "config.json").write_bytes((DEMO_FOLDER / "config.json").read_bytes())
    checkpoints.write_tensors(tmp_path, given)
    tied = gib(report_of(capsys, *flags), "weights")
    head = given["model.embed_tokens.weight"] + 1
    checkpoints.write_tensors(tmp_path, given | {"lm_head.weight": head})
    assert gib(report_of(capsys, *flags), "weights") - tied == head.nbytes


def test_what_does_not_fit_is_said_in_gib_with_the_flags(capsys):
    assert plan.main(["--model", "preset:llama-3.1-70b", "--target", "v6e"]) == 2
    error = capsys.readouterr().err
    assert "weights 131.4" in error
    assert "0.00 GiB are free besides the weights" in error
    assert "--tensor-parallel-size" in error


def test_a_small_budget_alone_does_not_fail_by_the_default_number_of_sequences(capsys):
    report = report_of(capsys, "--model", "preset:llama-3.1-8b", "--target", "h100", "--max-num-batched-tokens", "128")
    assert gib(report, "state of 64 request slots") > 0


def test_the_shapes_of_the_programs_are_listed(capsys):
    flags = ["--model", "preset:llama-3.2-1b", "--target", "v6e"]
    flags += ["--max-num-seqs", "16", "--max-num-batched-tokens", "128"]
    assert plan.main([*flags, "--shapes", "--no-compile"]) == 0
    report = capsys.readouterr().out.splitlines()
    listed = [line.split() for line in report if " rows  " in line]
    (count,) = (int(line.split("; ")[1].split()[0]) for line in report if "programs to compile" in line)
    assert len(listed) == count
    assert ["counted", "16", "tokens", "16", "rows", "greedy"] in listed
    assert ["counted", "128", "tokens", "16", "rows", "score"] in listed
