"""instructor's modes that hold the model to a schema: the demo's objects are valid, whole and streamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".venv/instructor"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.clients,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="instructor is not installed: scripts/test --all installs it"),
]


@pytest.fixture(scope="module")
def objects(server) -> dict[str, dict[str, object]]:
    client = Path(__file__).parent / "instructor_client.py"
    environment = os.environ | {"PYTHONPATH": f"{PACKAGES}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, str(client), server.url], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("tools", {"expression": "347 * 21"}),
        ("tools_strict", {"expression": "347 * 21"}),
        ("json_schema", {"text": "47 + 35 = 82.", "answer": 82}),
    ],
)
def test_the_object_has_the_form_that_was_asked_for(objects, mode, expected):
    assert objects[mode] == {"whole": expected, "streamed": expected}
