"""Schemathesis, which makes requests of `/openapi.json`, on the demo and on a server with keys.

It finds no answer with a status of 500 or above, and none outside the schema. A request may set a limit on its time in
the queue: beyond that it is 503.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.clients import imported
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.running import ECHO, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.clients]

# Not all that is checked is in a schema, such as the length of a text. Unknown fields, and `5.0` for 5, are accepted.
BEYOND_SCHEMAS = "positive_data_acceptance,negative_data_rejection"


ADMIN = (
    r"^/(drain|server_info|log_level|abort_requests|reset_prefix_cache|admin/reload|sleep|wake_up|is_sleeping|pause|resume|"
    r"is_paused|init_weight|start_weight|update_weights|finish_weight|get_weight|weight_info|get_world)"
)
CONFIG = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503]\n'
WITHOUT_A_MODEL = rf"^/(v1/models|v1/messages/count|load|tokenizer_info)|{ADMIN}"


def attack(folder: Path, url: str, *options: str) -> None:
    """The boundary values of each field, and a few random requests for each route. Fails if any fault is found."""
    imported("schemathesis", package="schemathesis")
    command = [
        *(sys.executable, "-W", "ignore", "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--url", url),
        *("--phases", "coverage,fuzzing", "--max-examples", "5", "--seed", "0", "--exclude-checks", BEYOND_SCHEMAS),
        *("--continue-on-failure", "--no-color", "--warnings", "off", *options),
    ]
    (folder / "schemathesis.toml").write_text(CONFIG)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_demo(server, tmp_path):
    attack(tmp_path, server.url, "--exclude-path-regex", ADMIN)  # without an admin key they are closed
    assert server.wait_for_metrics(lambda m: m["num_requests_running"] == 0)["num_compiles_after_warm_up_total"] == 0


def test_a_server_with_keys(tmp_path):
    keys = {"api_keys": ("key",), "admin_api_keys": ("boss",)}
    config = EchoConfig(reply=tuple(b"abc"))
    with running_server(tmp_path, ECHO, config, enable_tokenizer_info_endpoint=True, **keys) as server:
        header = ("--header", "Authorization: Bearer boss")
        attack(tmp_path, server.url, *header, "--include-path-regex", WITHOUT_A_MODEL)
