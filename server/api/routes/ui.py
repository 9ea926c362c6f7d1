"""The page at `/`: a chat, a dashboard and a planner, served from `server/ui`, and the dashboard's numbers.

The page needs no key, because it has no data. The routes that it calls need one. Its files are read once, at the start.
They load nothing from other hosts, which the content security policy enforces in the browser.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import JsonAnswer
from server.api.route import Access, ApiRoute
from server.api.routes.endpoints import Routes
from server.api.routes.planner import plan_routes
from server.api.state import ServerState
from server.http.body import read_query
from server.http.request_error import invalid

FOLDER = Path(__file__).parents[2] / "ui"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def ui_routes(state: ServerState) -> list[ApiRoute]:
    """The page's files and its numbers; none with `--no-ui`."""
    if not state.settings.ui:
        return []
    routes = [_file_route(path) for path in sorted(FOLDER.iterdir()) if path.suffix in CONTENT_TYPES]
    return [*routes, ApiRoute(path="/ui/state", endpoint=Dashboard(state).state), *plan_routes(state)]


def _file_route(path: Path) -> ApiRoute:
    content = path.read_bytes()
    headers = {
        "content-type": CONTENT_TYPES[path.suffix],
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return ApiRoute(path="/" if path.name == "index.html" else f"/ui/{path.name}", endpoint=serve, access=Access.OPEN)


class _StateQuery(msgspec.Struct):
    after: int = -1  # the number of a step
    engine: Annotated[int, msgspec.Meta(ge=0)] = 0


class Dashboard(Routes):
    """Answers `/ui/state`."""

    async def state(self, request: Request) -> Response:
        """The engines' statistics, and the sampled steps of `?engine=NUMBER` after `?after=NUMBER`. Raises RequestError
        400."""
        query, num_engines = read_query(request.query_params, _StateQuery), len(self._state.engines)
        if query.engine >= num_engines:
            raise invalid("engine", f"the number of an engine, 0 to {num_engines - 1}, got {query.engine}")
        return JsonAnswer(self._snapshot(query.engine, query.after))

    def _snapshot(self, engine: int, last: int) -> dict[str, Any]:
        state, stats = self._state, self._state.engine.stats
        steps = state.engines[engine].stats.recent_steps
        names = {state.model.name: 0} | {name: model.identity for name, model in state.engine.models.items()}
        return {
            "model": state.model.name,
            "max_model_len": state.engine.info.max_model_len,
            "engines": len(state.engines),
            "alive": state.engine.death is None,
            "running": stats.num_requests_running,
            "waiting": stats.num_requests_waiting,
            "pages": stats.num_pages,
            "pages_used": stats.num_pages_used,
            "pages_reusable": stats.num_pages_reusable,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "num_steps": stats.num_steps,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "draft_tokens": stats.speculation.num_draft_tokens,
            "draft_tokens_accepted": stats.speculation.num_accepted_tokens,
            "with_targets": sum(stats.by_targets.values()),
            "within_targets": sum(n for (*_, outcome), n in stats.by_targets.items() if outcome == "within"),
            "max_loras": state.engine.info.max_loras,
            "adapters": {
                "running": len(stats.running_of_adapters),
                "loaded": len(state.engine.adapters),
                "swaps": stats.num_adapter_loads,
            },
            "models": {name: stats.models[own] for name, own in names.items() if own in stats.models},
            "preemptions": stats.num_preemptions,
            "compiles_after_warm_up": stats.num_compiles_after_warm_up,
            "step_tokens": stats.step_tokens,
            "step_tokens_padded": stats.step_tokens_padded,
            "time_to_first_token": stats.time_to_first_token,
            "inter_token_latency": stats.inter_token_latency,
            "steps": [record for record in steps if record.number > last],
        }
