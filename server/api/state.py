"""What the routes share: one object for each running server, handed to them when the app is built."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from server.api.aside import Aside
from server.api.metrics import ServerMetrics
from server.engine.client import EngineClient
from server.engine.generation import Generation
from server.grammar.checker import GrammarChecker
from server.http.body import BodyLimits
from server.http.errors import model_not_found
from server.http.turns import Turns
from server.settings import Settings
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

MIN_MARKS = 2**16  # brackets and colons that a body may have whatever the context's length


@dataclass(kw_only=True, slots=True)
class ServerState:
    """What the routes share."""

    settings: Settings
    client: EngineClient
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None: the tokenizer has none
    metrics: ServerMetrics
    aside: Aside = field(default_factory=Aside)
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    turns: Turns = field(default_factory=Turns)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # shutting down: new requests are refused
    num_in_flight: int = 0  # requests on the counted routes
    # by the ids of their answers; whoever answers them keeps them alive
    generations: WeakValueDictionary[str, Generation] = field(default_factory=WeakValueDictionary)

    @property
    def body_limits(self) -> BodyLimits:
        """No prompt that fits the context has as many marks: a token rarely holds more than one of them."""
        max_marks = max(MIN_MARKS, 2 * self.client.info.max_model_len)
        return BodyLimits(max_bytes=self.settings.max_body_bytes, max_marks=max_marks)

    def check_model(self, name: str | None) -> str:
        """The name under which answers go out. Raises RequestError 404; no name means the model that there is."""
        if name and name not in self.settings.model_names:
            raise model_not_found(name)
        return name or self.settings.model_names[0]
