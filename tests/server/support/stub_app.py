"""The application over a client that answers at once: no engine, no socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx

from batcher.request import FinishReason
from batcher.stats import EngineStats
from server.api.state import ServerState
from server.app import create_app, create_state
from server.engine import wire
from server.engine.protocol import Receiver
from server.settings import Settings
from server.text.tokenizer import ByteLevelTokenizer
from server.text.tokenizer_files import ChatTemplates
from tests.server.support.tokenizers import LLAMA3_TEMPLATE, VOCAB_SIZE, byte_tokenizer

COMPLETIONS = "/v1/completions"


class StubClient:
    """Answers each request at once with what it was given."""

    def __init__(self, *outputs: wire.Output) -> None:
        self.info = wire.EngineInfo(max_model_len=64, vocab_size=VOCAB_SIZE)
        self.stats = EngineStats()
        self.adapters: dict[str, wire.Adapter] = {}
        self.models: dict[str, wire.LoadedModel] = {}
        self.num_adapter_loads = 0
        self.weight_version = wire.DEFAULT_VERSION
        self.missing: frozenset[str] = frozenset()
        self.is_paused = False
        self.death: str | None = None
        self.last_heartbeat = time.monotonic()
        self.aborted: list[str] = []
        self.num_resets = 0
        self.submitted: list[wire.WireRequest] = []
        self._outputs = outputs

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Receiver]]) -> None:
        for request, receiver in requests:
            self.submitted.append(request)
            receiver.on_weight_version(self.weight_version)
            for output in self._outputs:
                receiver.on_output(output)

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        self.aborted += request_ids

    async def ask(self, question: wire.Question) -> wire.Reply:
        return wire.Reply(error="a stub has no weights", status=501)

    def reset_prefix_cache(self, *, reset_external: bool) -> None:
        self.num_resets += 1


def state_of(client: StubClient, template: str | ChatTemplates | None = LLAMA3_TEMPLATE, **settings) -> ServerState:
    config = {"bos_token": "<|begin_of_text|>"}
    tokenizer = ByteLevelTokenizer(byte_tokenizer(), config=config, chat_template=template)
    return create_state(Settings(tokenizer_folder=Path(), model_names=("m",), **settings), client, tokenizer)


def client_of(state: ServerState) -> httpx.AsyncClient:
    """Of an application of its own."""
    transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def request(state: ServerState, method: str, path: str, **options) -> httpx.Response:
    async with client_of(state) as http:
        return await http.request(method, path, **options)


def call(state: ServerState, method: str, path: str, **options) -> httpx.Response:
    return asyncio.run(request(state, method, path, **options))


def post_all(state: ServerState, path: str, bodies: Iterable[dict], **options) -> list[httpx.Response]:
    """One after the other to one application."""

    async def post() -> list[httpx.Response]:
        async with client_of(state) as http:
            return [await http.post(path, json=body, **options) for body in bodies]

    return asyncio.run(post())


DONE = wire.Output("", [ord("a")], "length")
