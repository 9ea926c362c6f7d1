"""The state that the routes share: one object per running server, passed to them when the app is built."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from server.api.aside import Aside
from server.api.metrics import ServerMetrics
from server.api.tracing import Tracer
from server.engine.client import EngineClient
from server.engine.embedding import Embeddings
from server.engine.generation import Generation
from server.grammar.checker import GrammarChecker
from server.http.body import BodyLimits
from server.http.errors import model_not_found
from server.http.turns import Turns
from server.settings import Settings
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

MIN_MARKS = 2**16  # brackets and colons that a body may have even if the context is short


@dataclass(kw_only=True, slots=True)
class ServerState:
    """The state that the routes share."""

    settings: Settings
    client: EngineClient
    engines: Sequence[EngineClient]  # the client, or the engines of its group
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None: the tokenizer has none
    metrics: ServerMetrics
    tracer: Tracer | None = None  # None: there are no traces
    aside: Aside = field(default_factory=Aside)
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    turns: Turns = field(default_factory=Turns)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # shutting down: new requests are refused
    num_in_flight: int = 0  # requests on the counted routes
    # by the ids of their answers; the response keeps its generation alive
    generations: WeakValueDictionary[str, Generation | Embeddings] = field(default_factory=WeakValueDictionary)

    @property
    def body_limits(self) -> BodyLimits:
        """The limits of a body. A prompt that fits the context has fewer marks: a token rarely has more than one."""
        max_marks = max(MIN_MARKS, 2 * self.client.info.max_model_len)
        return BodyLimits(max_bytes=self.settings.max_body_bytes, max_marks=max_marks)

    def check_model(self, name: str | None) -> str:
        """The model's name in answers; without `name`, the server's first name. Raises RequestError 404."""
        if name and name not in self.settings.model_names:
            raise model_not_found(name)
        return name or self.settings.model_names[0]
