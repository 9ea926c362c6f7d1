"""The requests of /v1/responses and /v1/conversations."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from server.api.request.schemas import ITEMS, STOPS, Budget, CommonFields, Declared, Metadata, RawTypes


class InputPart(Declared):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Declared):
    """A message (then `type` may be missing), a call of a function, or what the function gave."""

    type: str | None = None
    role: str | None = None
    content: str | Annotated[list[InputPart], ITEMS] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # the namespace of the function
    arguments: str | None = None
    input: str | None = None  # for a call of a custom tool
    output: str | Annotated[list[InputPart], ITEMS] | None = None
    id: str | None = None  # for an `item_reference`, the item that it names; other items' ids have no effect
    status: str | None = None  # the answer continues a message of the assistant that is not complete


class KeptPart(InputPart, forbid_unknown_fields=False):
    """A part of a kept item's content."""


class KeptItem(InputItem, forbid_unknown_fields=False):
    """An item that this server has written. It may have fields that the model is not shown."""

    content: str | list[KeptPart] | None = None  # type: ignore[assignment]  # nothing adds parts to the list
    output: str | list[KeptPart] | None = None  # type: ignore[assignment]


class TextFormat(Declared):
    """The form of the text: free, JSON, or JSON by a schema."""

    type: str
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Declared):
    """What the text of the answer is to be."""

    format: TextFormat | None = None


class FunctionTool(Declared):
    """A tool of a body's `tools`: a function, a custom tool, whose input is a text, or a namespace of such tools."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None  # for a custom tool, the form of its input
    tools: Annotated[list[FunctionTool], ITEMS] | msgspec.UnsetType | None = msgspec.UNSET  # for a namespace


class ConversationName(Declared):
    """A conversation, named by its id."""

    id: str


class ResponsesRequest(CommonFields, kw_only=True):
    """The body of a request for a response."""

    raw_types: ClassVar[RawTypes] = {"tools": FunctionTool}

    input: str | Annotated[list[InputItem], ITEMS]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    store: bool | None = None  # None: true
    background: bool | None = None
    metadata: Metadata | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], STOPS] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # beyond OpenAI's
    include_reasoning: bool | None = None
    thinking_token_budget: Budget | None = None
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class NewConversation(Declared):
    """The body of a request for a conversation."""

    items: Annotated[list[InputItem], ITEMS] | None = None
    metadata: Metadata | None = None


class ConversationChange(Declared):
    """The body that changes a conversation."""

    metadata: Metadata | None


class NewItems(Declared):
    """The body that adds items to a conversation."""

    items: Annotated[list[InputItem], ITEMS]
