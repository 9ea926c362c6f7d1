"""The programs in `scripts/examples` are run as users run them, on the demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, DemoServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FOLDER = ROOT / "scripts/examples"
AGAINST_A_SERVER = {
    "chat": "> What is 47 + 35?\n47 + 35 = 82.\n> Which is larger, 31 or 57?\n57 is larger than 31.\n",
    "tools": 'calculator({"expression": "347 * 21"})\n347 * 21 = 7287.\n',
    "structured_output": None,
    "load": None,
}
ALONE = ("batch", "offline")


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"scripts.examples.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout


@pytest.mark.parametrize("name", AGAINST_A_SERVER)
def test_an_example_against_the_server(server: DemoServer, name: str) -> None:
    printed = run(name, f"{server.url}/v1")
    if (expected := AGAINST_A_SERVER[name]) is not None:
        assert printed == expected
    elif name == "structured_output":
        number, pattern = printed.split()
        assert number == "82"
        assert len(pattern) == 2 and pattern.isdigit()
    else:
        assert printed.startswith("16 streams, 1024 tokens: ")


def test_a_batch_without_a_server(engine_flags: list[str]) -> None:
    lines = run("batch", "--device", "cpu", *engine_flags).splitlines()
    chat, story = (json.loads(line)["response"]["body"] for line in lines)
    assert "82" in chat["choices"][0]["message"]["content"]
    assert story["usage"]["completion_tokens"] == 20


def test_generation_without_a_server() -> None:
    *sums, story = run("offline").splitlines()
    assert [answer.split()[-1] for answer in sums[:3]] == ["25.", "71.", "95."]
    assert story


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {"__init__", *AGAINST_A_SERVER, *ALONE}
    assert Path(FOLDER, "__init__.py").read_text().startswith('"""')
