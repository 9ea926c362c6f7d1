"""The routes by which administrators and trainers change the weights of a running server. Each needs an admin key.

A trainer's routes have vLLM's names. `/start_weight_update`, `/update_weights` (once or more often) and
`/finish_weight_update` are one update. The old weights serve until it is finished.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Annotated, ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.answers.answer import JsonAnswer
from server.api.request.body import BodyReader
from server.api.request.schemas import ITEMS
from server.api.route import Access
from server.api.routes.endpoints import route
from server.api.state import ServerState
from server.engine.wire import (
    PARTS,
    Array,
    ChangeWeights,
    InFolder,
    InSharedMemory,
    Pause,
    PauseMode,
    Resume,
    UpdateStep,
    UpdateWeights,
    WeightsChange,
    WeightsSource,
)
from server.http.body import read_query
from server.http.request_error import RequestError, invalid

logger = logging.getLogger("pallas_serve")

MOST_DIMENSIONS = msgspec.Meta(max_length=8)
MOST_NUMBERS = msgspec.Meta(ge=0, le=2**40)  # the range of an array's dimension
NOT_UPDATED = "The weights were not updated: "
MAX_VERSION_CHARS = 256  # a version is short because answers may have it
Backend = Literal["shared_memory", "path"]
BACKENDS: tuple[Backend, ...] = ("shared_memory", "path")


class ReloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to load other weights."""

    model: str | None = None  # a folder or file on the server's machine, or on each host; None: the start's


class InitInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How weights will come. They may come in any way, whatever it says."""

    backend: Backend | None = None


class InitRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request before the first update."""

    init_info: InitInfo


class UpdateInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Arrays by their Hugging Face names, and where they are."""

    names: Annotated[list[str], ITEMS] = []
    dtype_names: Annotated[list[str], ITEMS] = []
    shapes: Annotated[list[Annotated[list[Annotated[int, MOST_NUMBERS]], MOST_DIMENSIONS]], ITEMS] = []
    shared_memory: str | None = None  # a block of this machine, with the arrays in their order
    path: str | None = None  # a folder or a bucket with all weights, without names


class UpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request that brings weights."""

    update_info: UpdateInfo


class FinishRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to serve the weights that have come."""

    weight_version: str | None = None  # their name; None: the number of updates since the start


class _Flags(msgspec.Struct):
    """The parameters of queries that are true or false."""

    clear_cache: bool = True
    include_dp: bool = True


class Weights:
    """Answers the routes that change weights or report their state."""

    route_options: ClassVar = {"access": Access.ADMIN}

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._finish = BodyReader(FinishRequest, strict=state.settings.strict_fields)

    @route("POST /admin/reload", ReloadRequest)
    async def reload(self, request: Request, body: ReloadRequest) -> Response:
        """Loads other weights of the same shapes."""
        return await self._move(ChangeWeights(WeightsChange.RELOAD, body.model))

    @route("POST /sleep")
    async def sleep(self, request: Request) -> Response:
        """Frees the memory of the weights and of the K/V; requests wait.

        At level 1, the default, the weights are kept in the host's memory. At level 2 they are dropped, and others must
        come.
        """
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise invalid("level", f"it can be 1 or 2, not {level[:20]!r}")
        return await self._move(ChangeWeights(WeightsChange.SLEEP, level=int(level)))

    @route("POST /wake_up")
    async def wake_up(self, request: Request) -> Response:
        """Brings the weights and the K/V back to the device, or those of the two that `tags` name."""
        tags = tuple(request.query_params.getlist("tags"))
        for tag in tags:
            if tag not in PARTS:
                raise invalid("tags", f"each must be one of {', '.join(PARTS)}, not {tag[:20]!r}")
        return await self._move(ChangeWeights(WeightsChange.WAKE_UP, parts=tags or None))

    @route("GET /is_sleeping")
    async def is_sleeping(self, request: Request) -> Response:
        """Whether the engine sleeps."""
        return JsonAnswer({"is_sleeping": (await self._state.engine_state()).is_sleeping})

    async def _move(self, command: ChangeWeights) -> Response:
        await self._state.change(command, "The weights were not changed: ")
        logger.info("weights: %s%s", command.change.value, "" if command.model is None else f" from {command.model}")
        return JsonAnswer({"status": "ok"})

    @route("POST /pause")
    async def pause(self, request: Request) -> Response:
        """No request runs any more until /resume."""
        query = request.query_params
        if "wait_for_inflight_requests" in query:
            raise invalid("wait_for_inflight_requests", "this older name is not supported: there is mode=wait")
        mode, modes = query.get("mode", PauseMode.ABORT.value), [mode.value for mode in PauseMode]
        if mode not in modes:
            raise invalid("mode", f"it must be one of {', '.join(modes)}, not {mode[:20]!r}")
        clears_cache = read_query(query, _Flags).clear_cache
        await self._state.change(Pause(PauseMode(mode), clears_cache), "The engine was not paused: ")
        logger.info("the engine is paused (mode %s)", mode)
        return JsonAnswer({"status": "paused"})

    @route("POST /resume")
    async def resume(self, request: Request) -> Response:
        """Requests run again."""
        await self._state.change(Resume(), "The engine goes on pausing: ")
        logger.info("the engine goes on")
        return JsonAnswer({"status": "resumed"})

    @route("GET /is_paused")
    async def is_paused(self, request: Request) -> Response:
        """Whether the engine is paused."""
        return JsonAnswer({"is_paused": (await self._state.engine_state()).is_paused})

    @route("POST /init_weight_transfer_engine", InitRequest)
    async def init(self, request: Request, body: InitRequest) -> Response:
        """Checks that weights can come as the trainer will send them.

        vLLM's trainers call it before the first update. Nothing needs to be set up here.
        """
        return JsonAnswer({"message": "Weights can be sent.", "backends": BACKENDS})

    @route("POST /start_weight_update")
    async def start(self, request: Request) -> Response:
        """Begins an update of the weights. One that had begun is forgotten.

        A trainer that was killed during an update begins another one in this way.
        """
        await self._take(UpdateStep.ABANDON)
        await self._take(UpdateStep.BEGIN)
        return JsonAnswer({"message": "An update of the weights has begun."})

    @route("POST /update_weights", UpdateRequest)
    async def update(self, request: Request, body: UpdateRequest) -> Response:
        """Brings weights, all of them or some.

        Answered when the arrays have been copied: the sender may then use their memory again.
        """
        info = body.update_info
        await self._take(UpdateStep.RECEIVE, source_of(info))
        return JsonAnswer({"message": "The weights have come.", "num_arrays": len(info.names)})

    @route("POST /finish_weight_update", body=FinishRequest)
    async def finish(self, request: Request) -> Response:
        """Checks the weights that have come, and serves them.

        If they cannot be served, the update is over, and the old ones stay. The body may be missing.
        """
        state = self._state
        version: str | None = None
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            version = (await self._finish.read(request, state.body_limits)).weight_version
        if version is not None and not (0 < len(version) <= MAX_VERSION_CHARS and version.isprintable()):
            bounds = f"must have 1 to {MAX_VERSION_CHARS} characters, all of them printable"
            raise invalid("weight_version", bounds)
        update = ChangeWeights(WeightsChange.UPDATE, version=version or "")
        try:
            await self._state.change(update, NOT_UPDATED)
        except RequestError:
            await self._take(UpdateStep.ABANDON)
            raise
        logger.info("weights: updated%s", "" if version is None else f" to version {version}")
        return JsonAnswer({"message": "The weights are served."})

    async def _take(self, step: UpdateStep, source: WeightsSource | None = None) -> None:
        await self._state.change(UpdateWeights(step, source), NOT_UPDATED)

    @route("GET /get_weight_version")
    @route("GET /weight_info", summary="As /get_weight_version.")
    async def version(self, request: Request) -> Response:
        """The name of the weights that serve."""
        return JsonAnswer({"weight_version": (await self._state.engine_state()).weight_version})

    @route("GET /get_world_size")
    async def world_size(self, request: Request) -> Response:
        """The number of chips that compute.

        With `include_dp=false` those of one engine.
        """
        state = self._state
        includes_all = read_query(request.query_params, _Flags).include_dp
        chips = int(state.engine.info.cache_config.get("tensor_parallel_size", "1"))
        return JsonAnswer({"world_size": chips * len(state.engines) if includes_all else chips})


def source_of(info: UpdateInfo) -> WeightsSource:
    """The source of an update's weights. Raises RequestError 400 with everything that is wrong."""
    ways = [name for name in BACKENDS if getattr(info, name) is not None]
    counts = {name: len(getattr(info, name)) for name in ("names", "dtype_names", "shapes")}
    problems = []
    if len(ways) != 1:
        problems.append(f"one of {', '.join(BACKENDS)} must be given, not {' and '.join(ways) or 'none'}")
    if ways == ["path"] and any(counts.values()):
        problems.append("a folder names its own weights: leave out names, dtype_names and shapes")
    elif ways != ["path"] and (not info.names or len(set(counts.values())) > 1):
        given = ", ".join(f"{count} {name}" for name, count in counts.items())
        problems.append(f"there must be as many dtype_names and shapes as names, at least one, not {given}")
    if repeated := [name for name, count in Counter(info.names).items() if count > 1]:
        problems.append(f"names are given twice: {', '.join(repeated[:3])}")
    if problems:
        raise invalid("update_info", "; ".join(problems))
    if info.path is not None:
        return InFolder(info.path)
    columns = zip(info.names, info.dtype_names, info.shapes, strict=True)
    arrays = tuple(Array(name, dtype, tuple(shape)) for name, dtype, shape in columns)
    assert info.shared_memory is not None
    return InSharedMemory(info.shared_memory, arrays)
