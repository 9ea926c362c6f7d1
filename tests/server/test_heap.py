"""The garbage collector of a serving process does not read what was made before it served."""

from __future__ import annotations

from tests.server.support.echo_engine import PROGRAM_OBJECTS, EchoConfig
from tests.server.support.requests import wait_until
from tests.server.support.running import ECHO, RunningServer, running_server

A_START = 20_000  # fewer objects than the modules of any process here make


def frozen_in_engine(server: RunningServer) -> int:
    body = {"prompt": "a", "max_tokens": 20}
    with server.http() as http:
        return int(http.post("/v1/completions", json=body).json()["choices"][0]["text"])


def test_both_processes_freeze_their_heaps_before_they_serve(tmp_path):
    with running_server(tmp_path, ECHO, EchoConfig(says_heap=True)) as server:
        (line,) = (line for line in server.lines if line.startswith("frozen: "))
        assert int(line.removeprefix("frozen: ")) > A_START
        assert frozen_in_engine(server) > A_START


def test_programs_that_come_later_are_frozen(tmp_path):
    with running_server(tmp_path, ECHO, EchoConfig(says_heap=True, num_programs_to_come=2)) as server:
        wait_until(lambda: frozen_in_engine(server) > A_START + 2 * PROGRAM_OBJECTS)
