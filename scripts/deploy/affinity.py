"""Reads the beginning of a prompt from a request's body. Replicas are chosen by it."""

from __future__ import annotations

import json

UNIT = 4  # bytes of text that count as a token: a token has about as many


def prompt_of(body: bytes) -> bytes:
    """The body's prompt in whole units, after the client's own key. If two prompts begin alike, so do the results. It
    is empty for a body without a prompt, which the server refuses."""
    try:
        request = json.loads(body)
        key = request.get("prompt_cache_key")
        prompt = request.get("prompt") or request.get("input")
        if prompt is None:
            prompt = [request.get("system"), request.get("tools"), *request["messages"]]
        parts = prompt if isinstance(prompt, list) else [prompt]
        text = "\n".join(part if isinstance(part, str) else json.dumps(part) for part in [key, *parts])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return b""
    encoded = text.encode(errors="replace")
    return encoded[: len(encoded) // UNIT * UNIT]
