"""What replicas are chosen by: the begin of a request's prompt, as far as its body tells it."""

from __future__ import annotations

import json

UNIT = 4  # bytes of text that stand for a token, of which they are about as many


def prompt_of(body: bytes) -> bytes:
    """The body's prompt in whole units, with the client's own key before it: bodies whose prompts begin alike begin
    alike. Empty for a body that has no prompt; the server says what is wrong with it."""
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
