"""Middleware for all requests: request ids, API keys, refusals in a shutdown, counts, request log and traces."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.record import RequestRecord, current_record
from server.api.route import Access, ApiRoute, Refusals
from server.api.state import OpenRequest, ServerState, current_place
from server.http.auth import KeyRing, current_key
from server.http.request_error import RequestError, internal, overloaded, unavailable
from server.logs import ThrottledLog, current_request_id

logger = logging.getLogger("pallas_serve")

MAX_ID_CHARS = 200
LOAD = b"endpoint-load-metrics"


class Gate:
    """The outermost middleware except CORS. It is plain ASGI, so that each chunk passes only one small function.

    `routes` define the key that each path needs. Other paths need an API key.
    """

    def __init__(self, app: ASGIApp, state: ServerState, routes: Sequence[ApiRoute]) -> None:
        settings = state.settings
        open_paths = frozenset(route.path for route in routes if route.access is Access.OPEN)
        self._open_paths = frozenset() if settings.api_key_all_routes else open_paths
        self._admin_paths = frozenset(route.path for route in routes if route.access is Access.ADMIN)
        self._generating_paths = frozenset(route.path for route in routes if route.generates)
        self._refusals = Refusals(routes)
        self._app = app
        self._state = state
        self._log = ThrottledLog(logger)
        self._keys = KeyRing((*settings.api_keys, *settings.admin_api_keys) if settings.api_keys else ())
        self._key_names = settings.key_names
        self._most_per_key = settings.max_concurrent_per_key
        self._admin_keys = KeyRing(settings.admin_api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        key = self._keys.number(headers)
        record = RequestRecord(_request_id(headers), None if key is None else self._key_names[key])
        current_key.set(b"" if key is None else self._keys.digests[key])
        current_record.set(record)
        current_request_id.set(record.id)
        counted = scope["path"] in self._generating_paths
        refusal = self._refusal(scope, counted)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", record.id.encode("latin-1"))
                load = self._load_headers(headers) if counted else ()
                message["headers"] = [*message.get("headers", ()), own, *record.headers(), *load]
            await send(message)

        def end() -> None:
            if self._state.tracer is not None and counted:
                self._state.tracer.end(record, headers, status)
            self._state.end_request(record, scope["method"], scope["path"], status)

        by_key = counted and refusal is None and self._most_per_key is not None
        place = OpenRequest(self._state, key if by_key else None, end)
        current_place.set(place)
        num_of_key = place.hold() if counted else 0
        if self._most_per_key is not None and num_of_key > self._most_per_key:
            place.leave_key()
            self._state.metrics.observe_limit("key_share")
            message = f"This API key has {self._most_per_key} requests running already (--max-concurrent-per-key)."
            refusal = overloaded(message)
        try:
            app = self._refusals.response(scope, refusal) if refusal else self._app
            await app(scope, receive, send_with_id)
        except Exception as error:
            self._log.exception(f"%s %.200r failed: {type(error).__name__}", scope["method"], scope["path"])
            if status:
                raise  # too late for an answer: the connection is closed
            answer = self._refusals.response(scope, internal("The server has failed on this request."))
            await answer(scope, receive, send_with_id)
        finally:
            if counted:
                place.release()
            elif scope["path"] in self._admin_paths:
                end()
            if status:
                self._state.metrics.observe_response(
                    # the path of the route instead of the client's: there must be few labels
                    handler=getattr(scope.get("route"), "path", "none"),
                    method=scope["method"],
                    status=status,
                    seconds=time.monotonic() - record.started_s,
                )

    def _load_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
        """The engines' load for a balancer that asks for it, in the form of ORCA and with vLLM's names."""
        form = dict(headers).get(b"endpoint-load-metrics-format", b"").upper()
        if form in (b"JSON", b"TEXT"):
            stats = self._state.engine.stats
            load = {
                "kv_cache_usage_perc": stats.kv_cache_usage,
                "num_requests_waiting": float(stats.num_requests_waiting),
            }
            text = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
            yield LOAD, form + b" " + (text if form == b"TEXT" else json.dumps({"named_metrics": load})).encode()

    def _refusal(self, scope: Scope, counted: bool) -> RequestError | None:
        if scope["method"] == "OPTIONS" or scope["path"] in self._open_paths:
            return None
        if scope["path"] in self._admin_paths:
            if self._state.settings.admin_api_keys:
                return self._admin_keys.check(scope["headers"])
            message = "This route is for administrators, and the server was started without --admin-api-key."
            return RequestError(403, message, type="PermissionError")
        refusal = self._keys.check(scope["headers"])
        if refusal is None and counted and (reason := self._state.closed) is not None:
            return unavailable(reason, retry_after_s=5)
        return refusal


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and 0 < len(value) <= MAX_ID_CHARS:
            return value.decode("latin-1")
    return uuid.uuid4().hex
