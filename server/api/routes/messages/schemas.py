"""The requests of /v1/messages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from server.api.request.schemas import ITEMS, STOPS, Budget, Declared, Generates, LatencyTargets, Priority, RawTypes


class Source(Declared):
    """Where the text of a document is: in `data`, or in `content`."""

    type: str
    data: str | None = None
    content: str | Annotated[list[Block], ITEMS] | None = None


class Block(Declared):
    """A piece of a message's content: text, a document, a search result, a call of a tool, or what the tool gave."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], ITEMS] | None = None
    is_error: bool | None = None
    title: str | None = None  # for a document or a search result
    context: str | None = None  # for a document
    source: str | Source | None = None  # for a document; for a search result, its address
    tool_name: str | None = None  # for a reference to a tool


class InputMessage(Declared):
    """One message of the conversation."""

    role: str
    content: str | Annotated[list[Block], ITEMS]


class MessageTool(Declared):
    """A tool that the model may call."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None


class MessageToolChoice(Declared):
    """Whether and which tool must be called."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Declared):
    """The form of the output's text."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Declared):
    """What is asked of the output's text."""

    format: OutputFormat | None = None


class Thinking(Declared):
    """Whether the answer shows the model's reasoning, and how many tokens that may have."""

    type: str
    budget_tokens: Budget | None = None


class CountRequest(Declared, kw_only=True):
    """The body of a request to count tokens."""

    raw_types: ClassVar[RawTypes] = {"tools": MessageTool}

    messages: Annotated[list[InputMessage], ITEMS]
    model: str | None = None
    system: str | Annotated[list[Block], ITEMS] | None = None
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tool_choice: MessageToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # beyond Anthropic's


class MessagesRequest(CountRequest, Generates, kw_only=True):
    """The body of a request for an answer."""

    max_tokens: int
    stream: bool | None = False
    stop_sequences: Annotated[list[str], STOPS] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # beyond Anthropic's
    seed: int | None = None
    cache_salt: str | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    service_tier: str | None = None  # as in other routes
    slo: LatencyTargets | None = None
    timeout_s: float | None = None
