"""Coding agents against the server: each reads a file, edits it, runs its test and says so.

The model is a puppet, so the agents' own programs, prompts and tools are what is tested. They come from npm:

    npm install --prefix FOLDER @openai/codex @anthropic-ai/claude-code
    (cd FOLDER/node_modules/@anthropic-ai/claude-code && node install.cjs)
    PATH=FOLDER/node_modules/.bin:$PATH scripts/test --all tests/e2e/test_agents.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.conftest import serve
from tests.puppet import write_puppet

pytestmark = [pytest.mark.e2e, pytest.mark.clients]

BROKEN, MENDED = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TEST = 'from add import add\n\nassert add(2, 3) == 5\nprint("passed", file=open("result", "w"))\n'
LAST = "The test passes now."
CODEX_CONFIG = """
model = "puppet"
model_provider = "local"

[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""


def calls(agent: str, folder: Path) -> list[tuple[str, dict[str, str]]]:
    """The calls of a session, in the agent's own tools."""
    run = f"{sys.executable} test_add.py"
    if agent == "codex":
        commands = ["cat add.py", "sed -i 's/a - b/a + b/' add.py", run]
        return [("exec_command", {"cmd": command}) for command in commands]
    path = str(folder / "add.py")
    edit = {"file_path": path, "old_string": "a - b", "new_string": "a + b"}
    return [("Read", {"file_path": path}), ("Edit", edit), ("Bash", {"command": run, "description": "Run the test"})]


def command_of(agent: str, url: str, home: Path) -> tuple[Sequence[str], dict[str, str]]:
    """The agent's command and environment."""
    if agent == "codex":
        (home / ".codex").mkdir(parents=True)
        (home / ".codex/config.toml").write_text(CODEX_CONFIG.format(url=url))
        flags = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Mend add."]
        return ["codex", *flags], {"OPENAI_API_KEY": "none"}
    quiet = {"DISABLE_TELEMETRY": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
    own = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "puppet"}
    return ["claude", "-p", "Mend add.", "--dangerously-skip-permissions"], own | quiet


@pytest.mark.parametrize("agent", ["codex", "claude"])
def test_an_agent_mends_a_file_and_runs_its_test(agent, tmp_path):
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed: the agent itself is not tested")
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    (folder / "add.py").write_text(BROKEN)
    (folder / "test_add.py").write_text(TEST)
    answers = [
        [f"Step {i}. ", json.dumps({"name": name, "parameters": arguments})]
        for i, (name, arguments) in enumerate(calls(agent, folder))
    ]
    model = write_puppet(tmp_path / "model", [*answers, [LAST]])
    flags = ("--model", str(model), "--served-model-name", "puppet", "--max-num-seqs", "4")
    with serve(*flags, "--compile-cache", os.environ["JAX_COMPILATION_CACHE_DIR"]) as server:
        command, env = command_of(agent, server.url, home)
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"HOME": str(home)} | env, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert LAST in done.stdout
    assert (folder / "add.py").read_text() == MENDED
    assert (folder / "result").read_text() == "passed\n"
