"""Serves requests by an engine in this process, to the end of all."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from batcher.engine import Engine
from batcher.request import Request, RequestOutput
from scripts.flags.errors import FailedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What came of the requests. Times are those of `time.perf_counter`."""

    tokens: list[list[int]]  # of each request
    started_s: float  # before the first request is submitted
    all_begun_s: float  # when every request has its first token
    ended_s: float


def serve_all(engine: Engine, requests: Sequence[Request], timeout_s: float | None = None) -> Served:
    """Submits all requests at once, starts the engine, and shuts it down behind the last token.

    Raises:
        FailedError: a request ended with an error, or not all have ended in time.
    """
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    errors: list[str] = []
    num_waiting = num_running = len(requests)
    all_begun_s = ended_s = 0.0
    done = threading.Event()

    def on_output(output: RequestOutput) -> None:
        nonlocal num_waiting, num_running, all_begun_s, ended_s
        own = tokens[output.request_id]
        if not own and output.token_ids:
            num_waiting -= 1
            all_begun_s = time.perf_counter() if not num_waiting else all_begun_s
        own += output.token_ids
        if output.error is not None:
            errors.append(f"{output.request_id}: {output.error}")
        if output.finish_reason is not None:
            num_running -= 1
            if not num_running:
                ended_s = time.perf_counter()
                done.set()

    started_s = time.perf_counter()
    for request in requests:
        engine.add_request(request, on_output)
    engine.start()
    try:
        if not done.wait(timeout_s):
            raise FailedError(f"{num_running} requests have not ended in {timeout_s:g} s")
    finally:
        engine.shutdown()
    if errors:
        raise FailedError(f"{len(errors)} requests failed; the first: {errors[0]}")
    return Served(tokens=list(tokens.values()), started_s=started_s, all_begun_s=all_begun_s, ended_s=ended_s)
