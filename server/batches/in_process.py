"""Sends requests to the application without a socket, so a batch line has the same effect as its body over HTTP."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """POSTs a JSON body to `app` and returns the answer's status and whole body."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"in-process")],
        "client": None,
        "server": ("in-process", 80),
    }
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0
    parts: list[bytes] = []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        return await asyncio.Future()  # this client never disconnects

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)
