"""A start with an empty folder of programs: it serves before all of them are there. A second start finds them."""

from __future__ import annotations

import os
import re

import pytest

from tests.demo.one_layer import one_layer
from tests.e2e.conftest import DemoServer, serve

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LIMITS = ["--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--max-model-len", "128", "--num-pages", "16"]
KERNELS = ["--attention-backend", "reference"]  # those in C would be compiled anew, too
LEFT = re.compile(r"compiled 6 programs in .*; 1 more come while serving")


def answers(server: DemoServer) -> list[str]:
    """Greedy, by a program that is left for later, and sampled."""
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "seed": 7}
    with server.http() as http:
        texts = [http.post("/v1/completions", json=body | {"temperature": t}).json() for t in (0, 0.8)]
    return [text["choices"][0]["text"] for text in texts]


def test_it_serves_while_programs_are_compiled(tmp_path) -> None:
    flags = [*LIMITS, "--model", str(one_layer(tmp_path / "model")), "--served-model-name", "demo"]
    flags += [*KERNELS, "--compile-cache", str(tmp_path / "programs")]
    with serve(*flags) as server:
        assert any(LEFT.match(line) for line in server.lines), server.lines
        assert len(server.lines) <= 20 and max(map(len, server.lines)) <= 120, server.lines
        assert "came from the disk" not in "".join(server.lines)
        first = answers(server)
        metrics = server.wait_for_metrics(lambda m: m["num_programs_to_come"] == 0 < m["num_steps_total"], 120)
        assert metrics["num_compiles_after_warm_up_total"] == 0
        assert answers(server) == first
        with server.http() as http:
            assert http.get("/health?verbose").json()["programs_to_come"] == 0
    assert server.process.returncode == 0
    with serve(*flags, "--log-level", "debug") as warm:
        loaded = re.compile(r"compiled 0 programs in .*, 6 more were exported before\); 1 more come while serving")
        assert any(loaded.match(line) for line in warm.lines), warm.lines
        assert answers(warm) == first
        metrics = warm.wait_for_metrics(lambda m: m["num_programs_to_come"] == 0 < m["num_steps_total"], 120)
        assert metrics["num_compiles_after_warm_up_total"] == 0
        assert answers(warm) == first


def test_no_optional_folder_stops_a_start(tmp_path, capfd) -> None:
    """Below a file no folder can be made, whoever the user is."""
    (tmp_path / "file").touch()
    nowhere = tmp_path / "file" / "folder"
    homeless = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    homeless |= {"HOME": str(nowhere), "HF_HOME": str(nowhere)}
    flags = [*LIMITS, *KERNELS, "--model", str(one_layer(tmp_path / "model")), "--export-cache", str(nowhere)]
    with serve(*flags, "--served-model-name", "demo", env=homeless) as server:
        assert all(answers(server))
    assert server.process.returncode == 0
    said = capfd.readouterr().err
    assert "programs are not kept for the next start: " in said
