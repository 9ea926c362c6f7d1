"""`--kv-events-config`: the JSON of events for routers, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from model.inputs.words import shown
from server.engine.kv_events import FLAG, KvEventsConfig

_EXAMPLE = """'{"enable_kv_cache_events": true, "topic": "kv@POD@MODEL"}'"""


def kv_events_config(value: str | Mapping[str, Any] | None) -> KvEventsConfig | None:
    """The settings of a JSON object, or of its text. None: no events are published.

    Raises ValueError, with the flag's name, for anything else.
    """
    if value is None:
        return None
    try:
        fields = msgspec.json.decode(value) if isinstance(value, str) else dict(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{FLAG} {shown(value)} is not JSON ({error}); give an object such as {_EXAMPLE}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{FLAG} is a JSON object such as {_EXAMPLE}, not {shown(value)}")
    if unknown := sorted(fields.keys() - set(KvEventsConfig.__struct_fields__)):
        known = ", ".join(KvEventsConfig.__struct_fields__)
        raise ValueError(f"{FLAG}: unknown fields {', '.join(unknown)}; there are {known}")
    try:
        config = msgspec.convert(fields, KvEventsConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{FLAG}: {error}") from error
    return config if config.is_on else None
