"""A server on a Unix socket."""

from __future__ import annotations

import socket

import httpx
import pytest

from server.http.listener import bind
from server.settings import Settings
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT, HELLO
from tests.server.support.running import ECHO, running_server


def test_requests_come_through_the_socket(tmp_path):
    path = tmp_path / "s"
    with (
        running_server(tmp_path, ECHO, EchoConfig(), uds=path, root_path="/llm") as server,
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any", timeout=60) as http,
    ):
        assert server.url == f"unix:{path}"
        assert http.get("/health").status_code == 200
        assert http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
        streamed = http.post(CHAT, json=HELLO | {"stream": True, "max_tokens": 3}).text
        assert streamed.endswith("data: [DONE]\n\n")
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced_and_no_other(tmp_path):
    path = tmp_path / "s"
    settings = Settings(tokenizer_folder=tmp_path, model_names=("m",), uds=path)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with bind(settings) as listener:
        listener.listen()
        with pytest.raises(OSError, match="--uds"):
            bind(settings)
    path.unlink()
    path.write_text("a file of somebody's")
    with pytest.raises(OSError, match="cannot listen on"):
        bind(settings)
    assert path.read_text() == "a file of somebody's"
