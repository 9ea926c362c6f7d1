"""The bench "startup" with a real start, of one layer."""

import json

from scripts.lab import startup
from tests.demo.one_layer import one_layer


def test_phases_memory_and_cpu_time_of_a_start(tmp_path, capfd):
    few = ["--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--max-model-len", "32"]
    # Without the kernels in C, which would be compiled anew, too.
    few += ["--model", str(one_layer(tmp_path / "model")), "--attention-backend", "reference"]
    out = tmp_path / "out.json"
    arguments = ["--kinds", "cold", "--starts", "1", "--output-json", str(out), "--", "--device", "cpu", *few]
    assert startup.main(arguments) == 0
    [result] = json.loads(out.read_text())["cold"]
    assert {"start", "load", "allocate", "compiled", "ran"} <= result["phases"].keys()
    assert max(result["phases"].values()) <= result["ready"]
    assert result["cpu"] > 0
    assert result["engine_mib"] > result["http_mib"] > 10
    printed, errors = capfd.readouterr()
    titles, _, row = printed.splitlines()[-3:]
    assert titles.split()[:4] == ["|", "median", "|", "start"]
    assert row.split()[:2] == ["|", "cold"]
    assert "Broken pipe" not in errors


def test_a_server_that_refuses_its_flags_is_said(capfd):
    assert startup.main(["--kinds", "warm", "--", "--no-such-flag"]) == 1
    assert "startup: the server ended with code 2 before it was ready" in capfd.readouterr().err
