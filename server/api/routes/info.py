"""The routes that generate nothing: models, health, version, load, metrics, and the tokenizer's routes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from batcher.stats import ModelState
from server.api.answers.answer import JsonAnswer
from server.api.http_counts import HttpCounts
from server.api.metrics import CONTENT_TYPE
from server.api.named_folder import Loaded
from server.api.peers import Counted
from server.api.request.conversation import encode_conversation
from server.api.request.limits import check_text_length
from server.api.request.prompts import read_ids, read_prompts
from server.api.request.sampling import check_ids
from server.api.request.schemas import DetokenizeRequest, TokenizeRequest
from server.api.request.tools import read_tools
from server.api.route import Access, ApiRoute
from server.api.routes.endpoints import route, routes_of
from server.api.state import ServerState
from server.engine.embedding import fault_of_steps
from server.engine.protocol import fault_of
from server.engine.wire import Adapter
from server.http.auth import KeyRing
from server.http.body import read_query
from server.http.encoding import list_of
from server.http.request_error import RequestError, model_not_found, unavailable

TOKENIZER_INFO = "/tokenizer_info"
ANTHROPIC_VERSION = "anthropic-version"  # a header that every client of Anthropic's sends


def info_routes(state: ServerState) -> list[ApiRoute]:
    """The routes that generate nothing: models, health, load, version, tokens."""
    shows_tokenizer = state.settings.enable_tokenizer_info_endpoint
    return [each for each in routes_of(Info(state), state) if shows_tokenizer or each.path != TOKENIZER_INFO]


class _HealthQuery(msgspec.Struct):
    generate: bool = False


class _TokenizerQuery(msgspec.Struct):
    model: str | None = None


class Info:
    """Answers the routes of `info_routes`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._steps: asyncio.Future[list[str | None]] | None = None  # the check that runs, or the last one
        self._administrators = KeyRing(state.settings.admin_api_keys)

    @route("GET /v1/models")
    async def models(self, request: Request) -> Response:
        """The models that are served."""
        served = self._served()
        if ANTHROPIC_VERSION not in request.headers:
            models = [self._model(request, name, loaded) for name, loaded in served.items()]
            return JsonAnswer({"object": "list", "data": models})
        names = list(served)
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JsonAnswer({"data": [self._anthropic_model(name) for name in names], **ends})

    @route("GET /v1/models/{name:path}")
    async def model(self, request: Request) -> Response:
        """One of them."""
        name, served = request.path_params["name"], self._served()
        if name not in served:
            raise model_not_found(name)
        if ANTHROPIC_VERSION in request.headers:
            return JsonAnswer(self._anthropic_model(name))
        return JsonAnswer(self._model(request, name, served[name]))

    @route("GET /health", access=Access.OPEN)
    @route("GET /ping", access=Access.OPEN, summary="As /health.")
    @route("POST /ping", access=Access.OPEN, summary="As /health.")
    async def health(self, request: Request) -> Response:
        """Whether requests are served.

        With `?verbose`, the answer has the attention backend, the result of its self-test, and how many programs are
        still to be compiled. With `?generate=true` each engine computes a step, except on a follower host. Raises
        RequestError 503 if an engine is dead or silent, or computes no step, and if new requests are refused.
        """
        self._check_engine()
        if (reason := self._state.closed) is not None:
            raise unavailable(reason)
        if read_query(request.query_params, _HealthQuery).generate and not self._state.settings.is_follower:
            await self._check_steps()
        if "verbose" not in request.query_params:
            return JsonAnswer({"status": "ok"})
        attention = msgspec.structs.asdict(self._state.engine.info.attention)
        to_come = self._state.engine.stats.num_programs_to_come
        return JsonAnswer({"status": "ok", "attention": attention, "programs_to_come": to_come})

    @route("GET /live", access=Access.OPEN)
    async def live(self, request: Request) -> Response:
        """Whether the engine works, also in a shutdown.

        A restart would end the requests that still run then. Raises RequestError 503 if it is dead or silent.
        """
        self._check_engine()
        return JsonAnswer({"status": "ok"})

    def _check_engine(self) -> None:
        fault = fault_of(self._state.engine, self._state.settings.heartbeat_timeout_s)
        if fault is not None:
            raise unavailable(fault)

    async def _check_steps(self) -> None:
        """Raises RequestError 503 if an engine computes no step. Requests that come during a check share it."""
        if self._steps is None or self._steps.done():
            timeout_s = self._state.settings.heartbeat_timeout_s
            self._steps = asyncio.gather(*(fault_of_steps(engine, timeout_s) for engine in self._state.engines))
        for fault in await asyncio.shield(self._steps):
            if fault is not None:
                raise unavailable(fault)

    @route("GET /version", access=Access.OPEN)
    async def version(self, request: Request) -> Response:
        """The server's version."""
        return JsonAnswer({"version": self._state.settings.version})

    @route("GET /load")
    async def load(self, request: Request) -> Response:
        """How many requests are being answered."""
        return JsonAnswer({"server_load": self._state.load})

    @route("GET /metrics", access=Access.OPEN, media_types=(CONTENT_TYPE,))
    async def metrics(self, request: Request) -> Response:
        """Statistics for Prometheus."""
        metrics, peers = self._state.metrics, self._state.peers
        others = None if peers is None else await peers.ask(Counted(metrics.counts(), asks=True), HttpCounts)
        return Response(metrics.render(others), headers={"content-type": CONTENT_TYPE})

    def _served(self) -> dict[str, Loaded | None]:
        """The names of all models and adapters, each with what is loaded; None: it is the model of the start."""
        engine = self._state.engine
        own: dict[str, Loaded | None] = dict.fromkeys(self._state.settings.model_names)
        return {**own, **engine.models, **engine.adapters, **own}

    @route("POST /tokenize", TokenizeRequest)
    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        """The token ids of a text, or of a chat."""
        state = self._state
        model = await state.find_model(body.model)
        if body.messages is not None and body.prompt is None:
            tools = read_tools(body.tools, None, parallel=None)
            ids = await encode_conversation(state, model, body, tools)
        elif body.prompt is not None and body.messages is None:
            check_text_length(len(body.prompt), model.tokenizer, model.max_model_len)
            affixes = body.add_special_tokens is not False
            (prompt,) = await read_prompts(model, "prompt", [body.prompt], affixes=affixes)
            ids = prompt.ids
        else:
            raise RequestError(400, "Give either `prompt` or `messages`.", param="prompt")
        strings = list_of(map(model.tokenizer.vocabulary_string, ids), len(ids))
        answer = {
            "count": len(ids),
            "max_model_len": model.max_model_len,
            "tokens": list_of(ids, len(ids)),
            "token_strs": strings if body.return_token_strs else None,
        }
        return JsonAnswer(answer)

    @route(f"GET {TOKENIZER_INFO}")
    async def tokenizer_info(self, request: Request) -> Response:
        """The tokenizer's special tokens and chat template, of `?model=NAME`."""
        model = await self._state.find_model(read_query(request.query_params, _TokenizerQuery).model)
        tokenizer = model.tokenizer
        answer = {
            **tokenizer.template_variables,
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": model.max_model_len,
            "vocab_size": len(tokenizer.token_bytes),
            "special_tokens": tokenizer.special_tokens,
            "chat_template": self._state.settings.chat_template or tokenizer.chat_templates.default,
        }
        return JsonAnswer(answer)

    @route("POST /detokenize", DetokenizeRequest)
    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        model = await self._state.find_model(body.model)
        check_ids("tokens", body.tokens, model.vocab_size)
        text = await read_ids(model, body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return JsonAnswer({"prompt": text})

    def _anthropic_model(self, name: str) -> dict[str, Any]:
        created = datetime.fromtimestamp(self._state.model.created, UTC).isoformat().replace("+00:00", "Z")
        return {"type": "model", "id": name, "display_name": name, "created_at": created}

    def _model(self, request: Request, name: str, loaded: Loaded | None) -> dict[str, Any]:
        """The object of a model. Only administrators see an absolute path in `root`."""
        state, info = self._state, self._state.engine.info
        root = (state.model.root or name) if loaded is None else loaded.path
        if Path(root).is_absolute() and self._administrators.number(request.scope["headers"]) is None:
            root = name
        model = state.model_below(loaded) if isinstance(loaded, Adapter) else loaded
        identity = 0 if model is None else model.identity
        place = state.engine.stats.models.get(identity)  # None: the engine has not said yet
        if place is None and info.max_models:
            place = ModelState.DISK if identity else ModelState.RESIDENT
        return {
            "id": name,
            "object": "model",
            "created": state.model.created,
            "owned_by": "pallas-serve",
            "root": root,
            "parent": loaded.base_model or state.model.name if isinstance(loaded, Adapter) else None,
            "max_model_len": info.max_model_len if model is None else model.max_model_len,
            "permission": [_permission(name, state.model.created)],
        } | ({} if place is None else {"state": place})


_ALLOWED = dict.fromkeys("sampling logprobs view".split(), True)
_ALLOWED |= dict.fromkeys("create_engine search_indices fine_tuning".split(), False)


def _permission(name: str, created: int) -> dict[str, Any]:
    """The permission object of OpenAI's first API, which some clients still read."""
    head = {"id": f"modelperm-{name}", "object": "model_permission", "created": created}
    allowed = {f"allow_{action}": is_allowed for action, is_allowed in _ALLOWED.items()}
    return head | allowed | {"organization": "*", "group": None, "is_blocking": False}
