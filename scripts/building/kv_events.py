"""The publisher of K/V events that the settings ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from scripts.flags.settings import EngineSettings
from server.engine.block_hashes import BlockHasher, HashAlgorithm
from server.engine.kv_events import KvEventPublisher

SEED = "PYTHONHASHSEED"  # as in vLLM and its routers


def make_publisher(
    settings: EngineSettings,
    report: Callable[[str], None],
    *,
    rank: int = 0,
    environment: Mapping[str, str] = os.environ,
) -> KvEventPublisher | None:
    """A publisher with open sockets; None: the settings ask for no events.

    Raises ValueError if an endpoint cannot be used.

    Args:
        rank: the number of the engine among several.
    """
    config = settings.kv_events
    if config is None:
        return None
    seed = environment.get(SEED)
    hasher = BlockHasher(HashAlgorithm(settings.prefix_caching_hash_algo), seed)
    publisher = KvEventPublisher(config, hasher, rank)
    unseeded = "" if seed is not None else f"; without {SEED}, the hashes are of this engine only"
    report(f"  kv events         {config.endpoint_of(rank)}, topic {config.topic!r}{unseeded}")
    return publisher
