"""Serves HTTP from the time when the engine is ready until the server or the engine ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

from server.api.state import ServerState
from server.app import create_state
from server.engine.group import ServerEngine
from server.http.server import FLUSH_S, HttpServer
from server.http.signals import Shutdown, first_of
from server.settings import Settings
from server.text.tokenizer import ByteLevelTokenizer

logger = logging.getLogger("pallas_serve")

EXIT_OK = 0
EXIT_ENGINE_FAILED = 1
TICK_S = 0.02


def load_state(settings: Settings, engine: ServerEngine, scratch: Path | None = None) -> ServerState:
    """Loads the state that the routes share. This takes a second or more, so it is called in a thread. `scratch` is a
    folder of all HTTP processes.

    Raises ValueError for an unusable tokenizer or chat template.
    """
    tokenizer = ByteLevelTokenizer.from_folder(settings.tokenizer_folder, vocab_size=settings.vocab_size)
    return create_state(settings, engine, tokenizer, scratch=scratch)


async def serve(
    state: ServerState,
    engine: ServerEngine,
    server: HttpServer,
    ending: Shutdown,
    listener: socket.socket,
    on_started: Callable[[], None],
) -> int:
    """Serves `listener`, which must listen already, until `ending` or the engine's death. Returns the exit code.

    After `ending.stop` running requests may finish within `settings.grace_period_s`.
    """
    gc.freeze()  # a full collection of what the start has made would stop all streams for 50 ms
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    batches = None if state.run_batches is None else asyncio.create_task(state.run_batches())
    while not server.started and not serving.done():
        await asyncio.sleep(TICK_S)
    if not serving.done():
        on_started()
    await first_of(ending.stop.wait(), engine.died.wait(), asyncio.wait([serving]))
    if serving.done():
        await serving
        raise RuntimeError("the HTTP server has ended by itself")
    if batches is not None:
        batches.cancel()  # what they leave is done after the next start
    if engine.death is not None:
        # The engine's streams have ended with an error. For `death_linger_s`, /health shows load balancers the reason.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.stop.wait(), state.settings.death_linger_s)
        await _abort_the_rest(state, engine)
    else:
        await _drain(state, engine, ending, server)
    server.should_exit = True
    await serving
    if batches is not None:
        await asyncio.wait([batches])
    return EXIT_OK if engine.death is None else EXIT_ENGINE_FAILED


async def _drain(state: ServerState, engine: ServerEngine, ending: Shutdown, server: HttpServer) -> None:
    """Refuses new and incomplete requests and waits for the running ones, or a follower for its leader. Aborts them
    after the grace period or at a second signal."""
    state.draining = True
    server.drain()
    logger.info("shutting down: %d requests in flight", state.num_in_flight)
    deadline = time.monotonic() + state.settings.grace_period_s
    while (
        (state.num_in_flight or state.settings.is_follower)
        and time.monotonic() < deadline
        and not (ending.hurry.is_set() or engine.died.is_set())
    ):
        await asyncio.sleep(TICK_S)
    await _abort_the_rest(state, engine)


async def _abort_the_rest(state: ServerState, engine: ServerEngine) -> None:
    if state.num_in_flight:
        engine.abort_all()
        deadline = time.monotonic() + FLUSH_S
        while state.num_in_flight and time.monotonic() < deadline:
            await asyncio.sleep(TICK_S)
