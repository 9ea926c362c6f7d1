"""What the routes share: one object for each running server, handed to them when the app is built."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.chat_template import ChatTemplate, Part, encode_parts
from server.engine_client import EngineClient
from server.errors import model_not_found
from server.metrics import ServerMetrics
from server.settings import Settings
from server.tokenizer import LONG_TEXT_CHARS, Tokenizer


@dataclass(kw_only=True, slots=True)
class ServerState:
    settings: Settings
    client: EngineClient
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None: the tokenizer has none
    metrics: ServerMetrics
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # shutting down: new requests are refused
    num_in_flight: int = 0  # requests on the counted routes

    def check_model(self, name: str | None) -> str:
        """The name under which answers go out. Raises RequestError 404; no name means the model that there is."""
        if name and name not in self.settings.model_names:
            raise model_not_found(name)
        return name or self.settings.model_names[0]

    async def encode(self, parts: Sequence[Part]) -> list[int]:
        return await self.run_aside(sum(len(part.text) for part in parts), encode_parts, self.tokenizer, parts)

    async def run_aside[**P, R](self, num_chars: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Work on a text of so many characters: where it is long, in a thread, to hold up no stream."""
        if num_chars < LONG_TEXT_CHARS:
            return function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)
