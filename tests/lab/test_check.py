"""`scripts/check`: its parts' arithmetic and verdicts, its report, what it does about parts that fail, and its kit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from model.config import LlamaConfig
from model.presets import preset
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import Backend
from scripts.building.described_chips import name_of
from scripts.flags.errors import FailedError
from scripts.lab import check
from scripts.lab import dispatch as lab_dispatch
from scripts.lab.chip import dispatch, kernels, made_elsewhere, sanitizer, torch_peers
from scripts.lab.chip.kit import make_kit
from scripts.lab.chip.parts import PARTS, Options, Result
from scripts.lab.chip.progress import Progress, unknown, write_report
from scripts.lab.chip.steps import activity, kinds_of, work_of_step
from scripts.lab.chip.text import compare
from tests.scripts import faulty_forms

OPTIONS = Options.make(device="cpu", rehearse=True, models=(), seed=1, limit_s=100.0)


def test_the_bound_of_a_step_by_hand():
    config: LlamaConfig = replace(
        preset("llama-3.1-8b"), vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=3, num_heads=4,
        num_kv_heads=2, head_dim=2, eos_token_ids=(7,), bos_token_id=5,
    )  # fmt: skip
    layer = 8 * 2 * (4 + 2 + 2 + 4) + 3 * 8 * 16
    decode = work_of_step(config, num_tokens=5, num_rows=5, context=9)
    assert decode.num_bytes == 2 * (3 * layer + 8 * 100) + 3 * 5 * 10 * 2 * 2 * 2 * 2
    assert decode.flops == 2 * 5 * (3 * layer + 8 * 100) + 3 * 5 * 10 * 4 * (4 * 2)
    prefill = work_of_step(config, num_tokens=6, num_rows=1, context=0)
    assert prefill.flops == 2 * (6 * 3 * layer + 8 * 100) + 3 * (1 + 2 + 3 + 4 + 5 + 6) * 4 * (4 * 2)
    assert decode.least_s(decode.num_bytes, 1e30) == 1.0
    assert decode.least_s(1e30, decode.flops / 2) == 2.0


def token(text: str, **others: float) -> dict:
    top = [{"token": text, "logprob": -0.5}, *({"token": name, "logprob": value} for name, value in others.items())]
    return {"token": text, "logprob": -0.5, "top_logprobs": top}


def test_texts_may_part_at_a_near_tie_only():
    expected = [token("a"), token("b", c=-0.6, d=-2.0), token("e")]
    assert compare(expected, expected) == "equal"
    assert compare(expected, [token("a"), token("c"), token("x")]) == "equal until a near tie at token 1 (0.10 nats)"
    for wrong in ("d", "z"):
        verdict = compare(expected, [token("a"), token(wrong)])
        assert verdict == f"WRONG: token 1 is '{wrong}', on the CPU 'b'"
    assert compare(expected, expected[:2]).startswith("WRONG")


START = """jax on 1 x TPU v6 lite
  precompiled       7 programs for 8 K/V pages were made elsewhere, for v6e:1x1
  compiled 7 programs in 2.4 s ({found} came from the disk; tracing took 1.3 s, 7 were traced before)
ready after 9.1 s: http://127.0.0.1:8000/v1
"""


@pytest.mark.parametrize(("found", "status"), [(7, "right"), (6, "wrong"), (0, "wrong")])
def test_a_program_that_is_compiled_though_it_was_made_is_wrong(found, status):
    result = Result()
    made_elsewhere.read(START.format(found=found).splitlines(keepends=True), "v6e:1x1", result)
    assert (result.status, result.figures) == (status, {"target": "v6e:1x1", "needed": 7, "found": found})
    assert result.lines[-1].startswith(f"{found} of 7 programs came from those that were made for v6e:1x1")
    assert "7 programs for 8 K/V pages were made elsewhere" in result.lines[0]
    traced = Result()
    made_elsewhere.read(START.format(found=0).splitlines(keepends=True), "h100", traced, only_traced=True)
    assert (traced.status, traced.figures["found"]) == ("right", 7)  # on GPUs
    compiled = Result()
    loaded = START.replace("compiled 7", "compiled 2").replace(
        "7 were traced before", "2 were traced before, 5 more were exported before"
    )
    made_elsewhere.read(loaded.format(found=0).splitlines(keepends=True), "h100", compiled)
    assert (compiled.status, compiled.figures["found"], compiled.figures["needed"]) == ("wrong", 5, 7)
    with pytest.raises(FailedError, match="ended before it was ready"):
        made_elsewhere.read(START.splitlines()[:2], "v6e:1x1", Result())


def test_the_chips_of_a_host_as_a_target():
    assert name_of("v6e", [(0, 0, 0)]) == "v6e:1x1"
    assert name_of("v6e", [(x, y, 0) for y in range(4) for x in range(2)]) == "v6e:2x4"
    assert name_of("v5p", [(x, y, 0) for y in range(2) for x in range(2)]) == "v5p:2x2x1"
    assert name_of("tpu7x", 2 * [(0, 0, 0)]) == "tpu7x:1x1x1"  # two devices a chip


def test_a_part_that_fails_or_hangs_is_a_line_and_the_others_go_on(tmp_path):
    impossible = replace(OPTIONS, models=("no-such-model",))
    results = Progress(tmp_path, impossible).run(("versions", "steps"))
    assert results["versions"].status == "right"
    assert results["steps"].status == "failed"
    assert "unknown preset" in results["steps"].problems[0]
    assert any("no-such-model" in line for line in results["steps"].lines)  # the end of the log
    _, report = write_report(tmp_path, impossible, results)
    again = Progress(tmp_path, replace(impossible, limit_s=0.2), report).run(("versions", "steps"))
    assert again["versions"] == results["versions"]  # it has a result
    assert again["steps"].status == "late"
    assert "it was stopped after 0 s" in again["steps"].problems[-1]
    late = Progress(tmp_path, replace(impossible, limit_s=0.0)).run(("steps",))["steps"]
    assert (late.status, late.problems) == ("late", ["there was no time left for it"])
    assert Progress(tmp_path, OPTIONS).run(()) == {}  # without a report, a check begins anew


def test_a_resumed_part_measures_only_what_is_unknown(tmp_path):
    works: list[str] = []

    def work(name: str) -> int:
        works.append(name)
        if name == "b" and works.count("b") == 1:
            raise ValueError("the chip was lost")
        return len(works)

    def part(result: Result) -> None:
        result.measure({name: partial(work, name) for name in "abc"}, lambda name, found: result.say(f"{name} {found}"))

    path = tmp_path / "part.json"
    first = Result.begun(path)
    part(first)
    assert (first.status, first.unknown, first.problems) == ("failed", ["b"], ["b: the chip was lost"])
    assert Result.read(path).figures == {"a": 1, "c": 3}  # stored before the part's end
    first.write(path)
    second = Result.begun(path)
    part(second)
    assert works == ["a", "b", "c", "b"]
    assert (second.status, second.unknown, second.lines) == ("right", [], ["a 1", "b 4", "c 3"])


def test_the_report_names_what_is_unknown():
    half = Result(status="late", unknown=["8b, fp8, decode 512"])
    lines = unknown({"steps": half, "load": Result(), "starts": Result(status="late"), "text": Result(status="wrong")})
    assert "Whole steps (`steps`): 8b, fp8, decode 512" in lines
    assert "A cold and a warm start (`starts`)" in lines
    assert not [line for line in lines if "`load`" in line or "`text`" in line]
    assert len(lines) == len(PARTS) - 2


# Lines of XLA's log, of a step before graphs referred to buffers that stay.
LOG = """
I1128 207 cuda_command_buffer.cc:457] Add memcpy D2D node to a graph 0x55; size: 32
I1128 210 cuda_command_buffer.cc:850] Set kernel node params 0x49; kernel: loop_pad_fusion; gdx: 1
I1128 210 cuda_command_buffer.cc:850] Set kernel node params 0x4a; kernel: loop_pad_fusion; gdx: 1
I1128 211 cuda_command_buffer.cc:700] Set child node params 0x4b to params contained in 0x33
I1128 212 cuda_command_buffer.cc:500] Set memcpy D2D node params 0x4c; size: 4
"""


def test_the_nodes_that_xla_sets_are_read_from_its_log():
    kinds, names = dispatch.read_log(LOG)
    assert kinds == {"kernels": 2, "child graphs": 1, "copies": 1}
    assert names == {"loop_pad_fusion": 2}


def test_the_kernels_of_a_profile_are_summed_per_step():
    found = activity([(0.0, 5e3, "gemm"), (4e3, 6e3, "append"), (8e3, 13e3, "gemm")])
    assert found.busy_s == pytest.approx(11e-6)
    assert found.span_s == pytest.approx(13e-6)
    assert list(found.kernels.items()) == [("gemm", (2.0, 0.4)), ("append", (0.4, 0.2))]
    names = ("paged_decode_mosaic_gpu_kernel", "gemm_fusion_dot_7", "nvjet_tst_64x8", "scatter_fusion", "MemcpyD2D")
    kinds = kinds_of({name: (10.0**place, 1.0) for place, name in enumerate(names)})
    assert kinds == {"attention": 1.0, "products": 110.0, "the rest": 11_000.0}


SANITIZER = """#!/bin/sh
tool=$2; shift 2
echo "========= COMPUTE-SANITIZER"
[ $tool = racecheck ] && echo "========= Error: Race reported between Write access and Read access"
"$@"
echo "========= ERROR SUMMARY: 0 errors"
"""


def test_a_finding_of_a_tool_is_of_the_form_that_it_tested(tmp_path, monkeypatch):
    """With a program in place of NVIDIA's, which runs the real test."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sanitizer, "TOOLS", {"memcheck": (), "racecheck": ()})
    monkeypatch.setattr(sanitizer, "_forms", lambda _: [("demo", Backend.REFERENCE, "int8")])
    result = Result.begun(tmp_path / "sanitizer.json")
    sanitizer.run(replace(OPTIONS, rehearse=False), result)
    bad = "racecheck: demo, reference, K/V in int8"
    assert result.problems == [f"{bad}: Error: Race reported between Write access and Read access"]
    assert 0 < result.figures["memcheck: demo, reference, K/V in int8"]["largest_error"] < 0.05
    assert list(result.figures[bad]) == ["findings"]
    assert (result.status, result.unknown) == ("wrong", [])


PEER = """#!/bin/sh
[ "$1" = -c ] && exit 0
[ "$PYTHONSAFEPATH" ] || exit 2
echo '["PyTorch, decode 1", {"step_ms": 4.5}]'
exit 1
"""


def test_a_peer_that_dies_keeps_its_figures(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(PEER)
    python.chmod(0o755)
    monkeypatch.setenv("PEER_PYTHON", str(python))
    result = Result.begun(tmp_path / "peers.json")
    torch_peers.run(OPTIONS, result)
    assert result.figures == {"PyTorch, decode 1": {"step_ms": 4.5}}
    assert (result.status, result.unknown) == ("failed", ["PyTorch, decode 2", torch_peers.BATCHING])
    assert "| PyTorch, decode 1 | step_ms 4.50 |" in result.lines
    result.write(tmp_path / "peers.json")
    resumed = Result.begun(tmp_path / "peers.json")
    assert torch_peers.asked_for(OPTIONS, resumed.before)["rows"] == [2]
    python.write_text("#!/bin/sh\necho 'No module named torch' >&2; exit 1\n")
    torch_peers.run(OPTIONS, resumed)
    assert "cannot import PyTorch (No module named torch)" in resumed.lines[0]


def test_a_form_that_is_wrong_or_dies_is_named_and_the_next_is_tested(tmp_path, monkeypatch):
    """In real processes: the fault is in that of the form."""
    monkeypatch.setattr(kernels, "chip_backends", lambda *_, **__: [Backend.REFERENCE])
    monkeypatch.setattr(kernels, "_kv_dtypes", lambda *_, **__: ("int8", "float16", "bfloat16"))
    monkeypatch.setattr(kernels, "test_form", faulty_forms.test_form)
    path = tmp_path / "kernels.json"
    result = Result.begun(path)
    kernels.run(OPTIONS, result)
    assert result.status == "wrong"
    wrong, dead = result.problems
    assert wrong.startswith("demo, reference, K/V in int8: mixed step of 16 tokens in 2 rows: ")
    assert "is wrong: off by" in wrong
    assert dead == "demo, reference, K/V in float16: its process died of SIGSEGV"
    seen = [("problem" in form, "largest_error" in form) for form in result.figures["forms"]]
    assert seen == [(True, False), (True, False), (False, True)]
    assert Result.read(path).figures == result.figures  # also without an end
    assert Result.read(path).status == "late"


def test_a_pool_of_serving_size_has_pages_past_31_bits():
    model, backend = "llama-3.1-8b", Backend.GPU
    elements = PagedAttention(kernels.spec_of(model, backend, "bfloat16"), backend).kv_pages(1).size
    assert kernels.first_page_of(elements) * elements > 1 << 31


def test_the_report_says_what_is_wrong(tmp_path):
    bad = Result(lines=["| table |"], figures={"x": 1.5}, seconds=3.2)
    bad.wrong("8b, gpu: decode of 64 rows is off")
    versions = Result(figures={"device": "NVIDIA H100 80GB HBM3"})
    markdown, figures = write_report(tmp_path, replace(OPTIONS, rehearse=False), {"versions": versions, "kernels": bad})
    assert markdown.name.startswith("check-nvidia-h100-80gb-hbm3-20")
    text = markdown.read_text()
    assert "| Kernels against float32 | WRONG | 3 |" in text
    assert "| Throughput | not run | 0 |" in text
    assert "- **8b, gpu: decode of 64 rows is off**" in text
    assert json.loads(figures.read_text())["parts"]["kernels"]["figures"] == {"x": 1.5}


def test_the_command_checks_the_asked_parts_and_resumes(tmp_path, capsys):
    flags = ["--rehearse", "--parts", "versions", "--output", str(tmp_path)]
    assert check.main(flags) == 0
    (report,) = tmp_path.glob("check-rehearsal-*.md")
    assert "no figure here is a chip's" in report.read_text()
    assert "packages: jax 0." in report.read_text()
    assert "  Throughput (`load`)" in capsys.readouterr().out
    figures = report.with_suffix(".json")
    first = json.loads(figures.read_text())
    first["parts"]["text"] = Result(status="wrong").content()
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(first))
    assert check.main([*flags, "--resume", str(earlier)]) == 1
    assert "not in order: text" in capsys.readouterr().err
    assert json.loads(figures.read_text())["parts"]["versions"] == first["parts"]["versions"]
    assert check.main([*flags, "--model", "llama-3.2-1b", "--resume", str(earlier)]) == 2
    assert "['llama-3.2-1b']" in capsys.readouterr().err
    earlier.write_text("[1]")
    assert check.main([*flags, "--resume", str(earlier)]) == 2
    assert f"--resume {earlier}: no report of scripts/check" in capsys.readouterr().err


def test_without_a_chip_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setenv("PALLAS_SERVE_DEVICE", "cpu")
    assert check.main([]) == 2
    assert "--rehearse runs every part on a CPU" in capsys.readouterr().err


@pytest.mark.kernels
@pytest.mark.slow
def test_an_unpacked_kit_runs(tmp_path):
    said = make_kit(tmp_path / "kit.tgz")
    assert "packages for Python" in said
    with tarfile.open(tmp_path / "kit.tgz") as tar:
        tar.extractall(tmp_path, filter="data")
    root = tmp_path / "pallas-serve"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHON": sys.executable}
    command = [root / "scripts/check", "--rehearse", "--parts", "versions", "--output", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = tmp_path.glob("check-rehearsal-*.json")
    assert json.loads(figures.read_text())["parts"]["versions"]["figures"]["commit"]
    env["PYTHONPATH"] = f"{root}:{root / 'kit/packages'}"
    code = "import starlette, scripts.launch as l; print(starlette.__file__, l.__file__, l.version())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    server, launch, version = done.stdout.split()
    assert Path(server).is_relative_to(root / "kit/packages")
    assert Path(launch).is_relative_to(root)
    assert version


@pytest.mark.kernels
@pytest.mark.slow
def test_a_rehearsal_runs_every_part_to_its_end(tmp_path):
    command = [sys.executable, "-m", "scripts.lab", "check", "--rehearse", "--minutes", "60", "--output", tmp_path]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    (report,) = tmp_path.glob("check-rehearsal-*.md")
    assert done.returncode == 0, done.stdout + done.stderr + report.read_text()
    parts = json.loads(report.with_suffix(".json").read_text())["parts"]
    assert list(parts) == list(PARTS)
    assert all(part["status"] == "right" and part["lines"] for part in parts.values())
    left = report.read_text()
    assert "Still unknown" not in left


@pytest.mark.targets
@pytest.mark.slow
def test_a_step_sets_two_kernels_anew_and_no_child_graph(capfd):
    """XLA's real GPU client on a driver that does nothing. The two read the host's buffer and write the output. Those
    that read weights are set anew, too, when another model has the turn. No graph is made after the warm-up."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("needs jax's CUDA plug-in")
    assert lab_dispatch.main(["--model", "demo"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capfd.readouterr().out.splitlines() if line.startswith("| demo,")]
    found = {row[0]: row[1:5] for row in rows}
    of_weights = found.pop("demo, 8 rows, greedy, 2 models in turns")
    assert list(found) == ["demo, 8 rows, greedy", "demo, 8 rows, sample", "demo, 64 rows, greedy"]
    assert list(found.values()) == 3 * [["2", "0", "0", "2"]]
    assert 2 < int(of_weights[0]) <= 40 and of_weights[1:3] == ["0", "0"]


def test_without_the_plug_in_the_bench_of_dispatches_says_so(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert lab_dispatch.main([]) == 1
    assert "jax's CUDA plug-in is not installed here" in capsys.readouterr().err
