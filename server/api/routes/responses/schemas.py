"""The requests of /v1/responses and /v1/conversations, and the tables of their undeclared fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import msgspec

from server.api.request.fields import (
    NO_SHORTER,
    NO_VERBOSITY,
    TOOL_WITHOUT_EFFECT,
    FieldTable,
    Refused,
    of_other_routes,
)
from server.api.request.schemas import ITEMS, STOPS, CommonFields, Declared


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
    namespace: str | None = None  # of the function
    arguments: str | None = None
    input: str | None = None  # of a custom tool
    output: str | Annotated[list[InputPart], ITEMS] | None = None
    id: str | None = None  # of the item that an `item_reference` names; the ids of other items have no effect
    status: str | None = None  # of a message of the assistant that is not complete: the answer continues it


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
    format: dict[str, Any] | None = None  # of a custom tool's input
    tools: Annotated[list[FunctionTool], ITEMS] | msgspec.UnsetType | None = msgspec.UNSET  # of a namespace


class ConversationName(Declared):
    """A conversation, named by its id."""

    id: str


class ResponsesRequest(CommonFields, kw_only=True):
    """The body of a request for a response."""

    input: str | Annotated[list[InputItem], ITEMS]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    store: bool | None = None  # None: true
    background: bool | None = None
    metadata: dict[str, str] | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], STOPS] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    truncation: str | None = None
    # beyond OpenAI's
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class NewConversation(Declared):
    """The body of a request for a conversation."""

    items: Annotated[list[InputItem], ITEMS] | None = None
    metadata: dict[str, str] | None = None


class ConversationChange(Declared):
    """The body that changes a conversation."""

    metadata: dict[str, str] | None


class NewItems(Declared):
    """The body that adds items to a conversation."""

    items: Annotated[list[InputItem], ITEMS]


# The second half is of items that are left out.
_OF_ITEMS = frozenset({"phase", "summary", "encrypted_content", "action", "queries", "results", "result"})
_PART = FieldTable(
    kind=InputPart, without_effect=frozenset({"annotations", "logprobs", "image_url", "file_id", "detail"})
)
_ITEM = FieldTable(kind=InputItem, without_effect=_OF_ITEMS, inner={"content": _PART, "output": _PART})
_TOOL = FieldTable(kind=FunctionTool, without_effect=TOOL_WITHOUT_EFFECT)
_WITHOUT_EFFECT = frozenset(
    "client_metadata max_tool_calls prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
    "service_tier session_id spaces_between_special_tokens stream_options user".split()
)
RESPONSES_FIELDS = FieldTable(
    kind=ResponsesRequest,
    refused=of_other_routes(ResponsesRequest, but=_WITHOUT_EFFECT)
    | {
        "context_management": NO_SHORTER,
        "enable_response_messages": Refused("messages in the template's form are not shown yet"),
        "previous_input_messages": Refused("messages in the template's form are not read yet; there is `input`"),
        "prompt": Refused("templates of prompts are not supported yet"),
        "request_id": Refused("ids of responses are made by the server: they must be unique"),
    },
    without_effect=_WITHOUT_EFFECT,
    inner={
        "input": _ITEM,
        "conversation": FieldTable(kind=ConversationName),
        "text": FieldTable(
            kind=TextOptions,
            refused={"verbosity": NO_VERBOSITY},
            inner={"format": FieldTable(kind=TextFormat)},
        ),
        "tools": replace(_TOOL, inner={"tools": _TOOL}),
    },
)
CONVERSATION_FIELDS = FieldTable(kind=NewConversation, inner={"items": _ITEM})
CHANGE_FIELDS = FieldTable(kind=ConversationChange)
NEW_ITEMS_FIELDS = FieldTable(kind=NewItems, inner={"items": _ITEM})
