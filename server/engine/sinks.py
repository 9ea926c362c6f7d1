"""Passes what the engine says to the requests that wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from server.engine import wire


class Sink(Protocol):
    """Receives what one request gets. The first token comes in an output, and the last output has a finish reason."""

    def on_output(self, output: wire.Output) -> None: ...

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        """Tokens after which the request goes on."""


class Sinks:
    """The sinks of open requests. Outputs of a request that was removed are dropped."""

    def __init__(self) -> None:
        self._sinks: dict[str, Sink] = {}  # by request id
        self._names: dict[int, str] = {}  # number -> id of the requests that have their first output and not the last

    def __len__(self) -> int:
        return len(self._sinks)

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not ended."""
        return list(self._sinks)

    def add(self, request_id: str, sink: Sink) -> None:
        self._sinks[request_id] = sink

    def remove(self, request_id: str) -> bool:
        """Returns whether the request was open."""
        return self._sinks.pop(request_id, None) is not None

    def take(self, outputs: wire.Outputs) -> None:
        """Passes on what one message holds."""
        for output in outputs.outputs:
            self._take_output(output)
        if outputs.tokens is None:
            return
        names, sinks = self._names, self._sinks
        for number, token_ids in outputs.tokens.rows():
            sink = sinks.get(names[number])
            if sink is not None:
                sink.on_tokens(token_ids)

    def _take_output(self, output: wire.Output) -> None:
        sink = self._sinks.get(output.request_id)
        if output.finish_reason is None:
            self._names[output.number] = output.request_id
        else:
            self._names.pop(output.number, None)
            self.remove(output.request_id)
        if sink is not None:
            sink.on_output(output)

    def fail_all(self, error: str) -> None:
        """Ends every open request with the error."""
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            sink.on_output(wire.failure(request_id, error, status=500))
