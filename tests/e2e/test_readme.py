"""The READMEs' examples are run as they stand there, on the demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scripts import llm
from tests.e2e.conftest import LIMITS, ROOT, DemoServer

pytestmark = pytest.mark.e2e

READMES = sorted(
    path for path in ROOT.rglob("*.md") if ".venv" not in path.parts and path.parent.name != "results"
)  # fmt: skip
_TEXT = "\n".join(path.read_text() for path in READMES)
EXAMPLES = re.findall(r"^```(?:python|sh)\n(.*?)^```", _TEXT, re.DOTALL | re.MULTILINE)


def example(containing: str) -> str:
    (code,) = [code for code in EXAMPLES if containing in code]
    return code


def run_against(server: DemoServer, code: str) -> None:
    """Python for a server at the address that the README names."""
    assert "http://127.0.0.1:8000" in code
    exec(code.replace("http://127.0.0.1:8000", server.url), {})


def run_in(folder: Path, commands: str, replacement: tuple[str, str]) -> str:
    """What shell commands print in `folder`, with the modules of the checkout and the Python of this test."""
    for old, new in ((".venv/bin/python", sys.executable), replacement):
        assert old in commands
        commands = commands.replace(old, new)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["bash", "-ec", commands],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return result.stdout


def test_the_official_client_talks_to_the_server(server, capsys):
    run_against(server, example("stream=True"))
    assert "82" in capsys.readouterr().out


def test_offline_generation_from_python(settings, built, monkeypatch, capsys):
    # The same shapes as the other tests', so that no program is compiled anew.
    monkeypatch.setattr(llm, "LLM", partial(llm.LLM, device="cpu", compile_cache=settings.compile_cache, **LIMITS))
    exec(example("llm.chat"), {})
    assert "82" in capsys.readouterr().out


def test_weights_of_a_trainer_in_python(settings, built, monkeypatch):
    monkeypatch.setattr(llm, "LLM", partial(llm.LLM, device="cpu", compile_cache=settings.compile_cache, **LIMITS))
    names: dict[str, Any] = {}
    exec(example("llm.update_weights"), names)
    assert len(names["group"]) == 4 and names["llm"].weight_version == "1"


def test_a_benchmark_run(server, tmp_path):
    report = run_in(tmp_path, example("scripts.lab serving"), ("http://127.0.0.1:8000", server.url))
    assert "32 requests, closed loop, at most 8 in flight" in report


def test_every_example_is_run_here():
    assert len(EXAMPLES) == 4
