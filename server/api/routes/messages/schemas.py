"""The requests of /v1/messages, and the tables of their undeclared fields."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from server.api.request.fields import GENERATION, NO_SHORTER, TOOL_WITHOUT_EFFECT, FieldTable, Refused, of_other_routes
from server.api.request.schemas import ITEMS, STOPS, Declared


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
    title: str | None = None  # of a document or a search result
    context: str | None = None  # of a document
    source: str | Source | None = None  # of a document; a search result has its address
    tool_name: str | None = None  # of a reference to a tool


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
    budget_tokens: int | None = None


class CountRequest(Declared, kw_only=True):
    """The body of a request to count tokens."""

    messages: Annotated[list[InputMessage], ITEMS]
    model: str | None = None
    system: str | Annotated[list[Block], ITEMS] | None = None
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tool_choice: MessageToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # beyond Anthropic's


class MessagesRequest(CountRequest, kw_only=True):
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
    priority: int | None = None
    timeout_s: float | None = None


_OF_BLOCKS = frozenset({"cache_control", "citations", "caller", "signature", "thinking", "data"})
_OF_SOURCES = frozenset({"media_type", "url", "file_id"})
_IMAGE = FieldTable(kind=Source, without_effect=_OF_SOURCES)
_TEXT_BLOCK = FieldTable(kind=Block, without_effect=_OF_BLOCKS, inner={"source": _IMAGE})  # of a document
_SOURCE = FieldTable(kind=Source, without_effect=_OF_SOURCES, inner={"content": _TEXT_BLOCK})
_INNER_BLOCK = FieldTable(  # of what a tool gave
    kind=Block, without_effect=_OF_BLOCKS, inner={"content": _TEXT_BLOCK, "source": _SOURCE}
)
_BLOCK = FieldTable(kind=Block, without_effect=_OF_BLOCKS, inner={"content": _INNER_BLOCK, "source": _SOURCE})
_INNER = {
    "messages": FieldTable(kind=InputMessage, inner={"content": _BLOCK}),
    "system": _BLOCK,
    "tool_choice": FieldTable(kind=MessageToolChoice),
    "thinking": FieldTable(kind=Thinking, without_effect=frozenset({"display"})),
    "output_config": FieldTable(
        kind=OutputConfig,
        refused={"effort": Refused("a level of effort is not supported yet", ("high",), tunes=True)},
        inner={"format": FieldTable(kind=OutputFormat)},
    ),
    "tools": FieldTable(kind=MessageTool, without_effect=TOOL_WITHOUT_EFFECT),
}
_REFUSED = {
    "container": Refused("running code is not supported yet"),
    "context_management": NO_SHORTER,
    "mcp_servers": Refused("servers of tools are not supported yet"),
    "output_format": Refused("this older form of `output_config.format` is not supported yet"),
}
_ALSO_COUNTED = ("ec_transfer_params", "kv_transfer_params", "return_mm_kwargs", "vllm_xargs", "watermarking")
_WITHOUT_EFFECT = frozenset({"metadata", "service_tier", "cache_control", "betas", "inference_geo"})

MESSAGES_FIELDS = FieldTable(
    kind=MessagesRequest,
    refused=of_other_routes(MessagesRequest) | _REFUSED,
    without_effect=_WITHOUT_EFFECT,
    inner=_INNER,
)
COUNT_FIELDS = FieldTable(
    kind=CountRequest,
    refused=_REFUSED | {name: GENERATION[name] for name in _ALSO_COUNTED},
    without_effect=_WITHOUT_EFFECT,
    inner=_INNER,
)
