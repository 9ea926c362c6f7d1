"""HTTP over plain sockets, for requests that no client library sends."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

from tests.server.support.judged import judge
from tests.server.support.running import RunningServer

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


def connect(server: RunningServer, data: bytes = b"") -> socket.socket:
    """A connection on which `data` has been sent."""
    connection = socket.create_connection(server.address, timeout=TIMEOUT_S)
    connection.sendall(data)
    return connection


def post(path: str, body: dict[str, Any], *fields: str, version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: a", "Content-Type: application/json", *fields]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes. A reset counts as the end."""
    pieces = []
    try:
        while piece := connection.recv(65536):
            pieces.append(piece)
    except ConnectionError:
        pass
    return b"".join(pieces)


def answers(data: bytes) -> list[Answer]:
    """All answers in `data`, interim ones too; those in chunks with their framing taken off.

    JSON is judged by OpenAI's schemas.
    """
    found = []
    while data:
        head, separator, data = data.partition(b"\r\n\r\n")
        assert separator, f"not the head of an answer: {head[:200]!r}"
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = int(first.split()[1])
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while True:
                size, _, data = data.partition(b"\r\n")
                piece, data = data[: int(size, 16)], data[int(size, 16) + 2 :]
                if not piece:
                    break
                body += piece
        elif status >= 200:
            length = int(headers["content-length"])
            body, data = data[:length], data[length:]
            assert len(body) == length, "the answer is cut off"
        if headers.get("content-type", "").startswith("application/json") and body:
            judge(json.loads(body))
        found.append(Answer(status, headers, body))
    return found


def only_answer(connection: socket.socket) -> Answer:
    """The one answer that the server gives before it closes."""
    (answer,) = answers(read_all(connection))
    return answer
