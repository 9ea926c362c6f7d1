"""Replicas behind one endpoint on Ray Serve. Each replica has the server's application and its own engine.

    serve run scripts.deploy.ray_serve_app:build flags="--model meta-llama/Llama-3.1-8B-Instruct --device cuda" \
        resource=GPU max_replicas=8

Run it in the checkout with PYTHONPATH=$PWD, and `ray[serve]` next to the server's own packages (the extra `ray`).
A request goes to a replica that has had the beginning of its prompt, unless the replica's load is too high, as in
`server/engine/routing.py`. If a replica dies, its streams end with an error event, and requests without an answer yet
are sent to another one. `/metrics` and `previous_response_id` work within one replica only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Scope

from model.inputs.words import report_lines
from scripts import launch
from scripts.building.stand_in_tokenizer import tokenizer_folder
from scripts.deploy.affinity import prompt_of
from scripts.flags.settings import EngineSettings, ServedSettings
from server.api.route import OPENAI_ERRORS
from server.app import create_app, create_state
from server.engine.remote import RemoteEngine
from server.engine.routing import Router
from server.http.request_error import unavailable
from server.shared_counts import MOST_ENGINES, Load
from server.text.tokenizer import ByteLevelTokenizer

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}
logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `build`, all texts on the command line of `serve run`."""

    flags: str = ""  # the flags of scripts/serve
    resource: str = "CPU"  # the resource of a replica: GPU, TPU or CPU
    amount: float = 1.0  # the amount of that resource
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: int = 64  # per replica: above it replicas are added
    max_ongoing_requests: int = 512  # per replica; more wait at the ingress
    downscale_delay_s: float = 600.0  # a replica that ends loses its prefix cache

    @classmethod
    def read(cls, given: dict[str, Any]) -> Options:
        """Raises ValueError for an unknown name or a value of another type."""
        types = {name: type(value) for name, value in asdict(cls()).items()}
        if unknown := sorted(set(given) - set(types)):
            raise ValueError(f"unknown arguments {', '.join(unknown)}; there are {', '.join(types)}")
        return cls(**{name: types[name](value) for name, value in given.items()})


class PrefixRouter(RequestRouter):
    """Sends a request to the replica whose prefix cache may have the beginning of its prompt."""

    def initialize_state(self) -> None:
        """Called by Ray. There is one ingress, so this router knows all requests."""
        self.router = Router()
        self.numbers: dict[str, int] = {}  # of all replicas that there have been, by their ids

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which they are tried: the router's choice, then the others by their load. The
        second argument of the request is its body."""
        if len(self.numbers) + len(candidate_replicas) > MOST_ENGINES:
            self.numbers.clear()
            self.router.forget()
        replicas: dict[int, RunningReplica] = {}
        loads: dict[int, Load] = {}
        for replica in candidate_replicas:
            number = self.numbers.setdefault(replica.replica_id.unique_id, len(self.numbers))
            replicas[number] = replica
            loads[number] = Load(self.replica_queue_len_cache.get(replica.replica_id) or 0, 0)
        body = pending_request.args[1] if pending_request is not None and pending_request.args else b""
        chosen = self.router.choose(prompt_of(body), 0, loads).engine if loads else None
        return [[replicas[number]] for number in sorted(loads, key=lambda number: (number != chosen, loads[number]))]


class Replica:
    """The server's application over an engine's process. It ends with this process."""

    async def __init__(self, flags: str) -> None:  # type: ignore[misc]  # Ray awaits it
        args = launch.parse(shlex.split(flags))
        engine = EngineSettings.from_namespace(args)
        source = engine.source()
        self._folder = tempfile.TemporaryDirectory()
        tokenizer = tokenizer_folder(args.tokenizer, source, Path(self._folder.name), args.tokenizer_revision)
        settings = launch.server_settings(args, source, tokenizer)
        served = ServedSettings(engine=engine, tokenizer=tokenizer)
        self._engine = RemoteEngine.spawn(launch.ENGINE, served, report=lambda line: logger.info(report_lines(line)))
        await self._engine.start()
        text = ByteLevelTokenizer.from_folder(tokenizer, vocab_size=settings.vocab_size)
        self._app = create_app(create_state(settings, self._engine, text))
        self._timeout_s = settings.heartbeat_timeout_s
        self._name = f"{serve.get_replica_context().replica_id.unique_id}/{os.getpid()}"

    def check_health(self) -> None:
        """Raises RuntimeError if the engine is dead or silent. Ray then replaces this replica."""
        if self._engine.death is not None:
            raise RuntimeError(self._engine.death)
        if time.monotonic() - self._engine.last_heartbeat > self._timeout_s:
            raise RuntimeError("the engine is silent")

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Any]:
        """Yields the status and headers, then the bytes of the body."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        coming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if coming:
                return coming.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)
            finally:
                await messages.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    name = (b"x-replica", self._name.encode())
                    yield message["status"], [*message["headers"], name]
                elif message.get("body"):
                    yield message["body"]
        finally:  # also when the client has gone: the application then aborts the request
            gone.set()
            await task


class Ingress:
    """Forwards requests to a replica, and returns the bytes of its answers."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Answers a request. If the replica is lost, the answer is an error or ends with one."""
        body = await request.body()
        names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
        scope = {name: request.scope[name] for name in names if name in request.scope} | {"root_path": ""}
        for _ in range(2):  # before the first byte a request has had no effect
            answer = self._replicas.answer.remote(scope, body)
            try:
                status, headers = await anext(aiter(answer))
                break
            except RayActorError as error:
                logger.warning("a replica was lost before it answered: %s", type(error).__name__)
        else:
            return OPENAI_ERRORS.response(unavailable("The replicas that had the request were lost."))
        kept = {name.decode(): value.decode("latin-1") for name, value in headers if name.decode() not in HOP_BY_HOP}
        return StreamingResponse(_rest(answer, kept.get("content-type", "")), status, kept)


async def _rest(answer: Any, content_type: str) -> AsyncIterator[bytes]:
    """Yields the body. If the replica is lost, a stream of events ends with an error event."""
    try:
        async for piece in answer:
            yield piece
    except RayActorError:
        if not content_type.startswith("text/event-stream"):
            raise
        yield b"data: " + unavailable("The replica was lost.").encode() + b"\n\n"


def build(given: dict[str, Any]) -> serve.Application:
    """The application, from the arguments of `serve run`. Raises ValueError if one cannot be used."""
    options = Options.read(given)
    launch.parse(shlex.split(options.flags))  # an unknown flag ends `serve run`, not each replica
    amounts = {"CPU": {"num_cpus": options.amount}, "GPU": {"num_gpus": options.amount}}
    other: dict[str, Any] = {"resources": {options.resource: options.amount}}
    replicas = serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=options.max_ongoing_requests,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=30,
        ray_actor_options=amounts.get(options.resource, other),
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_ongoing_requests,
            "upscale_delay_s": 2,
            "metrics_interval_s": 2,
            "look_back_period_s": 4,
            "downscale_delay_s": options.downscale_delay_s,
        },
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    )
    few = {"num_cpus": 0.1}
    ingress = serve.deployment(Ingress, name="ingress", max_ongoing_requests=100_000, ray_actor_options=few)
    return ingress.bind(replicas.bind(options.flags))
