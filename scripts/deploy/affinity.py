"""Which replica a request goes to: one that has seen the begin of its prompt, unless it is much busier than another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

KEY_CHARS = 256


def affinity_key(body: bytes) -> str:
    """What stays the same from turn to turn: the client's own key, or all messages up to the user's first. Empty for a
    body that has neither; the server says what is wrong with it."""
    try:
        request = json.loads(body)
        key = request.get("prompt_cache_key") or request.get("user") or request.get("prompt") or request.get("input")
        if key is None:
            messages = request["messages"]
            first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
            key = [request.get("system"), messages[: first + 1]]
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    return (key if isinstance(key, str) else json.dumps(key))[:KEY_CHARS]


def ranked(key: str, load: Mapping[str, int], slack: int) -> list[str]:
    """The replicas in the order in which they are tried.

    By rendezvous hashing: a replica more or less moves only its own share of the keys.

    Args:
        key: empty: the idlest replica first.
        load: running requests of each replica, by name.
        slack: requests that the key's own replica may have more than the idlest.
    """
    by_load = sorted(load, key=lambda name: (load[name], name))
    if not key or not load:
        return by_load
    by_key = sorted(load, key=lambda name: hashlib.blake2b(f"{key}\0{name}".encode()).digest())
    return by_load if load[by_key[0]] - load[by_load[0]] > slack else by_key
