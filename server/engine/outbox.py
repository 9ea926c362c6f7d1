"""What the engine process tells the server, gathered into messages: one for a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from batcher.delivery import Tokens
from batcher.request import RequestOutput
from server.engine import wire

Item = RequestOutput | Tokens | wire.Output | wire.Event


def messages(items: Iterable[Item]) -> Iterator[wire.Event]:
    """The messages for `items`. Each request gets its outputs and tokens in their order.

    Tokens end a message, because they are read after its outputs. Scores of a prompt are long, and end a message, so
    the server's reader can yield.
    """
    outputs: list[wire.Output] = []
    for item in items:
        tokens = None
        if isinstance(item, RequestOutput):
            outputs.append(wire.output_to_wire(item))
            if item.prompt_logprobs is None:
                continue
        elif isinstance(item, wire.Output):
            outputs.append(item)
            continue
        elif isinstance(item, Tokens):
            tokens = wire.tokens_to_wire(item)
        else:
            if outputs:
                yield wire.Outputs(outputs)
            yield item
            outputs = []
            continue
        yield wire.Outputs(outputs, tokens)
        outputs = []
    if outputs:
        yield wire.Outputs(outputs)
