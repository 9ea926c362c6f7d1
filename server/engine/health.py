"""Whether an engine serves, for the routes that load balancers and process managers ask."""

from __future__ import annotations

import time

from server.engine.client import EngineClient


def fault_of(client: EngineClient, heartbeat_timeout_s: float) -> str | None:
    """Why the engine does not serve: it is dead, or has been silent for so long. None: it serves."""
    if client.death is not None:
        return f"The engine has failed: {client.death}"
    silent_s = time.monotonic() - client.last_heartbeat
    return None if silent_s <= heartbeat_timeout_s else f"The engine has not been heard of for {silent_s:.0f} s."
