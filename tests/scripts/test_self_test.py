"""The self-test of the attention backend at an engine's start, in real server processes with faulty kernels."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace

import jax.numpy as jnp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from batcher.buckets import BucketConfig
from batcher.request import Request, SamplingParams
from pallas_kernels.cpu import library, products
from pallas_kernels.self_test import Program
from pallas_kernels.spec import Backend
from scripts.building.attention_backend import NOT_TESTED, Backends, paged_attention, self_test_programs
from scripts.building.limits import bucket_config
from scripts.building.runner import build_runner, warm_engine
from scripts.flags.settings import EngineSettings
from scripts.lab.serve_all import serve_all
from server.settings import Settings
from tests.c_compiler import compiler
from tests.conftest import COMPILED
from tests.model import checkpoints
from tests.scripts import faulty_backends
from tests.server.support.running import running_server, spawn
from tests.server.support.tokenizers import write_folder

pytestmark = pytest.mark.slow

FAULTY = "tests.scripts.faulty_backends"
REQUEST = Request(
    request_id="r", prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
)
MIXED = "mixed step of 2 tokens in 1 rows"


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> EngineSettings:
    """Of a model that compiles quickly."""
    folder = checkpoints.write(tmp_path_factory.mktemp("model"), "gqa2")
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 2, "max_model_len": 32, "num_pages": 8}
    return EngineSettings(model=str(folder), device="cpu", compile_cache=str(COMPILED), **limits)


@pytest.fixture(scope="module")
def expected(settings) -> list[int]:
    """The answer to `REQUEST` over the reference."""
    built = build_runner(replace(settings, attention_backend="reference"), lambda line: None)
    (tokens,) = serve_all(warm_engine(built, lambda line: None), [REQUEST]).tokens
    assert len(tokens) == 4
    return tokens


def test_the_programs_are_the_ladders_own():
    programs = [
        (p.num_tokens, p.num_rows) for p in self_test_programs(bucket_config(EngineSettings(), "gpu", 1), "gpu")
    ]
    assert programs == [(2048, 256), (256, 256)]
    small = BucketConfig(max_num_batched_tokens=16, max_num_seqs=2)
    assert [str(program) for program in self_test_programs(small, "cpu")] == [
        "mixed step of 16 tokens in 2 rows",
        "decode of 2 rows",
    ]
    with_drafts = BucketConfig(max_num_batched_tokens=16, max_num_seqs=2, num_drafts=3, max_draft_rows=2)
    assert [str(program) for program in self_test_programs(with_drafts, "gpu")][2:] == [
        "step of 2 rows of up to 4 tokens"
    ]
    one = BucketConfig(max_num_batched_tokens=2, max_num_seqs=1)
    assert self_test_programs(one, "gpu") == [Program(num_tokens=2, num_rows=1), Program(num_tokens=1, num_rows=1)]


def test_the_reference_on_a_cpu_is_not_compared_with_itself(settings):
    said: list[str] = []
    info = build_runner(replace(settings, attention_backend="reference"), said.append).info.attention
    assert (info.requested, info.backend, info.self_test, info.failures) == ("reference", "reference", NOT_TESTED, {})
    (line,) = (line for line in said if line.startswith("  self-test"))
    assert "not needed" in line


def test_a_machine_without_a_c_compiler_serves_with_the_reference(settings, monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setattr(library, "_loaded", {})
    reason = "CC=/nowhere/cc is not a program: install one, such as gcc"
    said: list[str] = []
    info = build_runner(settings, said.append).info.attention
    assert (info.requested, info.backend, info.failures) == ("auto", "reference", {"cpu": reason})
    (line,) = (line for line in said if line.startswith("  self-test"))
    slower = "several times slower than the backend cpu"
    warning = f"WARNING: serving with the attention backend reference, {slower}. Not used: cpu: {reason}"
    assert f"{warning}; attention backend" in line
    with pytest.raises(ValueError, match=f"--attention-backend cpu cannot be used here: cpu: {reason}"):
        build_runner(replace(settings, attention_backend="cpu"), said.append)


def test_the_c_code_serves_bfloat16(settings):
    compiler()
    info = build_runner(replace(settings, dtype="bfloat16", self_test="always"), lambda line: None).info.attention
    assert (info.backend, info.self_test, info.failures) == ("cpu", "passed", {})


def test_wrong_products_serve_no_token(settings, monkeypatch):
    compiler()
    multiply = products.multiply
    monkeypatch.setattr(products, "multiply", lambda *of: multiply(*of) * (of[1].dtype != jnp.int8))
    info = build_runner(replace(settings, self_test="always"), lambda line: None).info.attention
    fault = "failed its self-test: the product of 1 rows with a kernel 32 x 34 of int8 is wrong"
    assert (info.backend, info.failures) == ("reference", {"cpu": fault})


def test_a_server_falls_back_and_says_so_everywhere(settings, tmp_path):
    refused = f"gpu: failed its self-test: {MIXED} does not compile: NotImplementedError: no such instruction"
    with running_server(tmp_path, f"{FAULTY}:build_with_fallback", settings) as server, server.http() as http:
        (warning,) = (line for line in server.lines if "WARNING" in line)
        assert f"Not used: {refused}; gpu-mma: failed its self-test: {MIXED}: " in warning
        assert "is wrong: not a number" in warning
        assert "serving with the attention backend reference, several times slower than the backend gpu." in warning
        assert "please report it, with this line" in warning
        assert server.log.count("failed its self-test") == 2
        assert http.get("/health").json() == {"status": "ok"}
        attention = http.get("/health?verbose").json()["attention"]
        assert (attention["requested"], attention["backend"]) == ("auto", "reference")
        assert list(attention["failures"]) == ["gpu", "gpu-mma"]
        families = text_string_to_metric_families(http.get("/metrics").text)
        metrics = {family.name.removeprefix("pallas_serve:"): family.samples for family in families}
        assert [sample.value for sample in metrics["attention_backend_failures"]] == [2]
        assert {sample.labels["backend"]: sample.value for sample in metrics["attention_backend"]} == {
            "gpu": 0, "gpu-mma": 0, "reference": 1,
        }  # fmt: skip
        body = {"model": "test-model", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
        assert http.post("/v1/completions", json=body).status_code == 200


def test_a_backend_asked_for_by_name_does_not_start_with_a_fault(settings, tmp_path):
    server = Settings(tokenizer_folder=write_folder(tmp_path), model_names=("m",), port=0)
    asked = replace(settings, attention_backend="gpu-mma")
    process = spawn(server, f"{FAULTY}:build_without_fallback", asked)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    (failed,) = (line for line in said.splitlines() if line.startswith("failed: "))
    assert f"--attention-backend gpu-mma cannot be used here: gpu-mma: failed its self-test: {MIXED}" in failed
    assert "WARNING" not in said


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (faulty_backends.Refused, f"{MIXED} does not compile: NotImplementedError: no such instruction"),
        (faulty_backends.NoNumbers, f"{MIXED}: a chunk of 2 tokens over 2 keys is wrong: not a number"),
        (faulty_backends.Raising, f"{MIXED} does not run: JaxRuntimeError: "),
        (faulty_backends.Dying, "its process died of SIGSEGV"),
    ],
)
def test_no_fault_of_a_form_reaches_the_process_that_serves(settings, kind, reason):
    chosen = faulty_backends.choose_with_fallback(kind, settings)
    assert chosen.info.backend == "reference"
    assert chosen.info.failures["gpu"].startswith(f"failed its self-test: {reason}")
    assert multiprocessing.active_children() == []


def test_a_form_that_hangs_is_given_up(settings):
    chosen = faulty_backends.choose_with_fallback(faulty_backends.Hanging, settings, limit_s=0.5)
    assert chosen.info.backend == "reference"
    assert chosen.info.failures == {"gpu": "failed its self-test: it did not end within 0.5 s"}
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("kind", [faulty_backends.Faultless, faulty_backends.NoNumbers, faulty_backends.Refused])
def test_the_programs_of_a_form_are_traced_while_another_process_tests_it(kind, settings, expected, tmp_path):
    """If it fails, those of the form that serves are made anew."""
    tested_s: list[float] = []

    def report(line: str) -> None:
        if line.startswith("  self-test"):
            tested_s.append(time.perf_counter())

    fresh = replace(settings, compile_cache=str(tmp_path), compile_all_first=True)
    built = build_runner(fresh, report, compile_meanwhile=True, backends=faulty_backends.in_the_place_of_a_gpus(kind))
    is_early = built.runner.programs._compilation.started_s < tested_s[0]
    assert (built.info.attention.backend, is_early) == (
        ("gpu", True) if kind is faulty_backends.Faultless else ("reference", False)
    )
    assert serve_all(warm_engine(built, report), [REQUEST]).tokens == [expected]


def test_a_start_whose_model_the_kernels_do_not_take_serves_with_the_reference(settings, expected):
    """With the kernels' own check of the model, whose heads have 16 dimensions, and programs compiled meanwhile."""
    gpus = Backends(candidates=lambda *_: (Backend.GPU, Backend.GPU_MMA, Backend.REFERENCE), make=paged_attention)
    said: list[str] = []
    built = build_runner(settings, said.append, compile_meanwhile=True, backends=gpus)
    failures = built.info.attention.failures
    assert (built.info.attention.backend, list(failures)) == ("reference", ["gpu", "gpu-mma"])
    assert all("the GPU kernels take head_dim in (64, 128): spec.head_dim=16" in reason for reason in failures.values())
    (line,) = (line for line in said if line.startswith("  self-test"))
    assert "WARNING: serving with the attention backend reference, several times slower than " in line
    assert f". Not used: gpu: {failures['gpu']}" in line
    assert serve_all(warm_engine(built, said.append), [REQUEST]).tokens == [expected]


def test_a_hang_that_no_other_form_can_replace_ends_the_start(settings, tmp_path):
    server = Settings(tokenizer_folder=write_folder(tmp_path), model_names=("m",), port=0)
    process = spawn(server, f"{FAULTY}:build_hanging", replace(settings, attention_backend="gpu"))
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    (failed,) = (line for line in said.splitlines() if line.startswith("failed: "))
    assert "the self-test of the attention backend gpu did not end within 0.5 s" in failed
    assert "--attention-backend reference does without it" in failed


def test_a_form_is_tested_here_where_no_second_process_can_use_the_device(settings):
    """As with a GPU in compute mode EXCLUSIVE_PROCESS: the child has no device, and the kernels are not blamed."""
    no_device = replace(settings, device="cuda")  # there is none: a child cannot start on it
    chosen = faulty_backends.choose_with_fallback(faulty_backends.NoNumbers, no_device)
    assert chosen.info.failures["gpu"].startswith(f"failed its self-test: {MIXED}: a chunk of 2 tokens")


def test_a_daemonic_process_tests_by_itself(settings):
    """It may not have children, and a start in it must not fail for that."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=faulty_backends.send_choice, args=(sender, faulty_backends.NoNumbers, settings), daemon=True
    )
    process.start()
    sender.close()
    assert receiver.recv()["gpu"].endswith("is wrong: not a number")
    process.join()
