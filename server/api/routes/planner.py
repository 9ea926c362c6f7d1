"""The planner of the page at `/`. It runs in separate processes, which estimate and simulate, because it needs jax.

One process answers all estimates. It is started for the first one, and ends after it has been idle for a while. A
search runs in a separate process, which is killed when its client disconnects. Only one search runs at a time.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from model.inputs.schema import integer, number_above
from server.api.answers.answer import STREAM_HEADERS, AsgiResponse, JsonAnswer, while_connected
from server.api.request.body import BodyReader
from server.api.route import ApiRoute
from server.api.state import ServerState
from server.http.encoding import DONE, encode_json, event
from server.http.request_error import RequestError, internal, overloaded, unavailable

logger = logging.getLogger("pallas_serve")

ESTIMATE_TIMEOUT_S = 60.0  # including the start of the process
SEARCH_TIMEOUT_S = 600.0
IDLE_S = 300.0
BEAT_S = 0.2  # between two writes to a stream: only a write shows that its client has disconnected
LINE_BYTES = 16 * 2**20  # the size limit of an answer

Name = Annotated[str, msgspec.Meta(max_length=200)]
Tokens = Annotated[int, integer(1, 2**20)]
Positive = Annotated[float, number_above(0, 1e9)]


class PlanRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a request for a plan: what the page's form holds. The planner's process checks the names."""

    model: Name
    target: Name
    workload: Name
    prompt_tokens: Tokens | None = None  # for the workload `custom`, like the next field
    output_tokens: Tokens | None = None
    request_rate: Positive | None = None  # per second; None: the highest within the limits of latency
    ttft_ms: Positive | None = None
    itl_ms: Positive | None = None
    quantization: Name | None = None
    kv_cache_dtype: Name | None = None
    price_per_hour: Positive | None = None  # for all chips together
    api_prices: Annotated[list[Name], msgspec.Meta(max_length=16)] = []  # NAME=IN/OUT, of a million tokens
    simulate: bool = False  # searches in simulated time, and streams the progress


def plan_routes(state: ServerState) -> list[ApiRoute]:
    """The routes of the planner; none if there is no command for it."""
    if not state.settings.planner:
        return []
    plan = Plan(state)
    return [
        ApiRoute(path="/ui/plan", endpoint=plan.options),
        ApiRoute(path="/ui/plan", endpoint=plan.plan, method="POST"),
    ]


class PlannerProcess:
    """A process of the planner. It reads a line of JSON for each request and writes lines of JSON."""

    error: Exception | None = None

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._aborted = False

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._aborted and not self._stdin.is_closing()

    async def answers(self, request: PlanRequest | None) -> AsyncIterator[dict[str, Any] | None]:
        """Yields the progress of a search, and at the end the answer. Yields None after BEAT_S without a line. The
        request None asks for the options.

        Raises RequestError if the planner refuses, the error of `fail`, or ConnectionError if the process has ended.
        """
        if self.is_alive:
            self._stdin.write(encode_json(request) + b"\n")
            await self._stdin.drain()
        while True:
            try:
                line = await asyncio.wait_for(self._stdout.readline(), BEAT_S)
            except TimeoutError:
                yield None
                continue
            if not line:
                raise self.error or ConnectionError("the planner's process has ended")
            answer: dict[str, Any] = msgspec.json.decode(line)
            if (refusal := answer.get("refusal")) is not None:
                raise RequestError(400, refusal["message"], param=refusal["param"])
            yield answer
            if "progress" not in answer:
                return

    def fail(self, error: Exception) -> None:
        """Ends the process. The reader of its answers gets the error."""
        self.error = error
        self.abort()

    def abort(self) -> None:
        """Ends the process."""
        if self._process.returncode is None and not self._aborted:
            self._aborted = True
            self._process.kill()


class Plan:
    """Answers `/ui/plan`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._reader = BodyReader(PlanRequest, strict=True)
        self._kept: PlannerProcess | None = None
        self._turn = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._searches = False

    async def options(self, request: Request) -> Response:
        """What the form offers: models, chips, workloads and prices."""
        return await self._estimate(None)

    async def plan(self, request: Request) -> Response:
        """The plan of a choice; with `simulate`, events with the progress and then the plan. Raises RequestError."""
        body: PlanRequest = await self._reader.read(request, self._state.body_limits)
        return AsgiResponse(partial(self._search, body)) if body.simulate else await self._estimate(body)

    async def _estimate(self, body: PlanRequest | None) -> Response:
        try:
            async with self._turn, asyncio.timeout(ESTIMATE_TIMEOUT_S):
                return JsonAnswer(await self._ask_kept(body))
        except TimeoutError as error:
            raise RequestError(400, f"The estimate took longer than {ESTIMATE_TIMEOUT_S:g} s.") from error
        except OSError as error:
            raise _failed(error) from error

    async def _ask_kept(self, body: PlanRequest | None) -> dict[str, Any]:
        if self._idle is not None:
            self._idle.cancel()
        if self._kept is None or not self._kept.is_alive:
            self._kept = await self._start()
        try:
            (answer,) = [answer async for answer in self._kept.answers(body) if answer is not None]
            return answer
        except RequestError:
            raise
        except BaseException:
            self._kept.abort()  # its next line would be the answer of another request
            raise
        finally:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._kept.abort)

    async def _start(self) -> PlannerProcess:
        process = await asyncio.create_subprocess_exec(
            *self._state.settings.planner,
            stdin=PIPE,
            stdout=PIPE,
            limit=LINE_BYTES,
            start_new_session=True,  # Ctrl-C in a terminal is for the server
        )
        return PlannerProcess(process)

    async def _search(self, body: PlanRequest, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams a search in a separate process, which ends when the client disconnects."""
        if self._searches:
            raise overloaded("Another search runs on this server. Please try again when it has ended.", 10)
        self._searches = True
        try:
            async with while_connected(receive, process := await self._start()):
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                async for block in self._events(process, body):
                    await send({"type": "http.response.body", "body": block, "more_body": True})
                await send({"type": "http.response.body", "body": DONE})
        except OSError as error:
            raise _failed(error) from error
        finally:
            self._searches = False

    async def _events(self, process: PlannerProcess, body: PlanRequest) -> AsyncIterator[bytes]:
        try:
            async with asyncio.timeout(SEARCH_TIMEOUT_S):
                async for answer in process.answers(body):
                    if self._state.draining:
                        process.fail(unavailable("The server is shutting down."))
                    yield b": \n\n" if answer is None else event(encode_json(answer))
        except RequestError as error:
            yield event(error.encode())
        except TimeoutError:
            yield event(RequestError(400, f"The search took longer than {SEARCH_TIMEOUT_S:g} s.").encode())
        except OSError as error:
            yield event(_failed(error).encode())


def _failed(error: OSError) -> RequestError:
    logger.warning("the planner of the page failed: %s", error)
    return internal("The planner's process has failed. The server's log may say why.")
