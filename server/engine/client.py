"""An engine that is reached by messages (`wire.py`): its requests, outputs and questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType

import msgspec

from batcher.request import FinishReason
from server.bus import OpenQuestions
from server.engine import wire
from server.engine.protocol import Engine, Receiver, Receivers


class EngineClient(Engine):
    """An `Engine` that takes commands and sends events. All of it runs on the event loop's thread. Nothing awaits while
    an output goes to its receiver, so a client that reads slowly delays neither the engine nor other clients."""

    api_server = 0  # the number of this process in commands
    info = wire.EngineInfo(max_model_len=0, vocab_size=0)
    weight_version = wire.DEFAULT_VERSION  # of the tokens that come from now on
    is_paused = False
    missing: Set[str] = frozenset()
    adapters: Mapping[str, wire.Adapter] = MappingProxyType({})  # by name
    models: Mapping[str, wire.LoadedModel] = MappingProxyType({})  # by name
    adapter_changes = num_adapter_loads = 0  # since the engine's start

    def __init__(self) -> None:
        super().__init__()
        self.on_output: Callable[[wire.Output], None] = lambda output: None  # gets each before the request's receiver
        self._receivers = Receivers()
        self._asked = OpenQuestions[wire.Reply]()

    def _send(self, command: wire.Command) -> None:
        """Sends a command to the engine."""
        raise NotImplementedError

    @property
    def num_open(self) -> int:
        return len(self._receivers)

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Receiver]]) -> None:
        for request, receiver in requests:
            receiver.on_weight_version(self.weight_version)
            self._receivers[request.request_id] = receiver
        self._send(wire.Submit([request for request, _ in requests], self.api_server))

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        known = [request_id for request_id in request_ids if self._receivers.pop(request_id, None) is not None]
        if known and self.death is None:
            self._send(wire.Abort(known, reason))

    def reset_prefix_cache(self, *, reset_external: bool) -> None:
        if self.death is None:
            self._send(wire.ResetPrefixCache(reset_external))

    async def _ask(self, question: wire.EngineQuestion) -> wire.Reply:
        """A dead engine's reply is an error with status 503."""
        if self.death is not None:
            return self._reply_of_the_dead()
        number, replied = self._asked.add()
        self._send(msgspec.structs.replace(question, number=number))
        reply = await replied
        if reply.missing is not None:
            self.missing = frozenset(reply.missing)
        if reply.error is None and isinstance(question, wire.Pause | wire.Resume):
            self.is_paused = isinstance(question, wire.Pause)
        return reply

    def _reply_of_the_dead(self) -> wire.Reply:
        return wire.Reply(error=f"The engine has failed: {self.death}", status=503)

    def _on_event(self, event: wire.Event) -> None:
        match event:
            case wire.Outputs(outputs=outputs):
                for output in outputs:
                    self.on_output(output)
                self._receivers.take(event)
            case wire.WeightVersion(version=version):
                self.weight_version = version
                for receiver in self._receivers.values():
                    receiver.on_weight_version(version)
            case wire.Adapters(adapters=adapters, num_changes=num_changes, num_loads=num_loads, models=models):
                self.adapters = {adapter.name: adapter for adapter in adapters}
                self.models = {model.name: model for model in models}
                self.adapter_changes, self.num_adapter_loads = num_changes, num_loads
            case wire.Reply():
                self._asked.close(event.number, event)
