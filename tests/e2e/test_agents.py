"""Coding agents against the server: each reads a file, edits it, runs its test and says so.

The model is a puppet, so the agents' own programs, prompts and tools are what is tested. They come from npm:

    npm install --prefix FOLDER @openai/codex @anthropic-ai/claude-code opencode-ai @continuedev/cli cline
    (cd FOLDER/node_modules/@anthropic-ai/claude-code && node install.cjs)
    (cd FOLDER/node_modules/opencode-ai && node postinstall.mjs)
    PATH=FOLDER/node_modules/.bin:$PATH scripts/test --all tests/e2e/test_agents.py

aider comes from PyPI (`aider-chat`), into an environment of its own. It calls no tools: it applies edits in the answer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import serve
from tests.puppet import write_puppet

pytestmark = [pytest.mark.e2e, pytest.mark.clients]

BROKEN, MENDED = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TEST = 'from add import add\n\nassert add(2, 3) == 5\nprint("passed", file=open("result", "w"))\n'
LAST = "The test passes now."
TASK = "Mend add."
CODEX_CONFIG = """
model = "puppet"
model_provider = "local"

[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""


CONTINUE_CONFIG = """
name: local
version: 0.0.1
schema: v1
models:
  - {{name: puppet, provider: openai, model: puppet, apiBase: "{url}/v1", apiKey: none, capabilities: [tool_use]}}
"""
AIDER_EDIT = """\
Mended.

add.py
```python
<<<<<<< SEARCH
    return a - b
=======
    return a + b
>>>>>>> REPLACE
```
"""
RUN = f"{sys.executable} test_add.py"


def calls(agent: str, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a session, in the agent's own tools."""
    path, old, new = str(folder / "add.py"), "a - b", "a + b"
    described = {"command": RUN, "description": "Run the test"}
    match agent:
        case "codex":
            commands = ["cat add.py", "sed -i 's/a - b/a + b/' add.py", RUN]
            return [("exec_command", {"cmd": command}) for command in commands]
        case "claude":
            edit = {"file_path": path, "old_string": old, "new_string": new}
            return [("Read", {"file_path": path}), ("Edit", edit), ("Bash", described)]
        case "opencode":
            edit = {"filePath": path, "oldString": old, "newString": new}
            return [("read", {"filePath": path}), ("edit", edit), ("bash", described)]
        case "cn":
            edit = {"file_path": path, "old_string": old, "new_string": new}
            return [("Read", {"filepath": path}), ("Edit", edit), ("Bash", {"command": RUN})]
        case "cline":
            edit = {"path": path, "old_text": old, "new_text": new}
            return [
                ("read_files", {"files": [{"path": path}]}),
                ("editor", edit),
                ("run_commands", {"commands": [RUN]}),
            ]
    return []


def command_of(agent: str, url: str, home: Path) -> tuple[Sequence[str], dict[str, str]]:
    """The agent's command and environment. Writes its configuration."""
    match agent:
        case "codex":
            write(home / ".codex/config.toml", CODEX_CONFIG.format(url=url))
            flags = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
            return ["codex", *flags], {"OPENAI_API_KEY": "none"}
        case "claude":
            quiet = {"DISABLE_TELEMETRY": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
            own = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "puppet"}
            return ["claude", "-p", TASK, "--dangerously-skip-permissions"], own | quiet
        case "opencode":
            models = {"puppet": {"limit": {"context": 4096, "output": 512}}}
            local = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1"}, "models": models}
            allowed = dict.fromkeys(("edit", "bash", "external_directory"), "allow")
            config = {"provider": {"local": local}, "permission": allowed}
            write(home / ".config/opencode/opencode.json", json.dumps(config))
            return ["opencode", "run", "-m", "local/puppet", TASK], {}
        case "cn":
            write(home / "config.yaml", CONTINUE_CONFIG.format(url=url))
            return ["cn", "-p", TASK, "--auto", "--config", str(home / "config.yaml")], {}
        case "cline":
            login = ["cline", "auth", "-p", "openai", "-k", "none", "-m", "puppet", "-b", f"{url}/v1"]
            subprocess.run(login, env=os.environ | {"HOME": str(home)}, check=True, timeout=60)
            return ["cline", "-P", "openai", "-m", "puppet", "-k", "none", TASK], {}
    flags = ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable"]
    edits = ["--edit-format", "diff", "--test-cmd", RUN, "--auto-test", "--message", TASK, "add.py"]
    own = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}
    return ["aider", "--model", "openai/puppet", *flags, *edits], own


def write(file: Path, text: str) -> None:
    """With its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize("agent", ["codex", "claude", "opencode", "cn", "cline", "aider"])
def test_an_agent_mends_a_file_and_runs_its_test(agent, tmp_path):
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed: the agent itself is not tested")
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    (folder / "add.py").write_text(BROKEN)
    (folder / "test_add.py").write_text(TEST)
    answers = [
        [f"Step {i}. ", json.dumps({"name": name, "parameters": arguments})]
        for i, (name, arguments) in enumerate(calls(agent, folder))
    ]
    last = [AIDER_EDIT, LAST] if agent == "aider" else [LAST]
    model = write_puppet(tmp_path / "model", [*answers, last])
    flags = ("--model", str(model), "--served-model-name", "puppet", "--max-num-seqs", "4")
    with serve(*flags, "--compile-cache", os.environ["JAX_COMPILATION_CACHE_DIR"]) as server:
        command, env = command_of(agent, server.url, home)
        own = {"HOME": str(home), "PWD": str(folder)}
        done = subprocess.run(
            command, cwd=folder, env=os.environ | own | env, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert LAST in done.stdout
    assert (folder / "add.py").read_text() == MENDED
    assert (folder / "result").read_text() == "passed\n"
