"""The request bodies as typed structs. Decoding errors name the field at fault.

Only supported fields are declared. `server.api.request.fields` has the others. The class variable `raw_types` has the
types of fields that are kept as they came, or declared as any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from batcher.request import MAX_LOGPROB_TOKEN_IDS, MOST_TARGET_MS

MAX_TOKEN_IDS = 1_000_000  # of a prompt, or of all prompts of a request
MAX_ITEMS = 2**16  # of a list of messages, or of other objects

# Every list of a request has one of these bounds. Decoding tells which list is longer, and /openapi.json shows them.
TOKENS = msgspec.Meta(max_length=MAX_TOKEN_IDS)
ITEMS = msgspec.Meta(max_length=MAX_ITEMS)
WORDS = msgspec.Meta(max_length=256)  # words or token ids to look for in the output
ASKED = msgspec.Meta(max_length=MAX_LOGPROB_TOKEN_IDS)
STOPS = msgspec.Meta(max_length=32)

Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)]
Budget = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]  # of tokens; -1: none, as in vLLM
Penalty = Annotated[float, msgspec.Meta(ge=-10, le=10)]  # a power of lengths
Side = Literal["left", "right"]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]


# a text, token ids, or a list of either
Prompts = str | Annotated[list[str | int | Annotated[list[int], TOKENS]], TOKENS]


RawTypes = Mapping[str, type[msgspec.Struct]]


class Declared(msgspec.Struct, forbid_unknown_fields=True):
    """Decoding says where a field is that the type does not declare."""


TargetMs = Annotated[float, msgspec.Meta(gt=0, le=MOST_TARGET_MS)]


class LatencyTargets(Declared):
    """The latencies that a request wants."""

    itl_ms: TargetMs | None = None  # between two tokens
    ttft_ms: TargetMs | None = None  # to the first token
    percentile: Annotated[float, msgspec.Meta(ge=50, lt=100)] | None = None  # of the times between two tokens


class Generates(Declared):
    """The body of a route that generates, or the parameters in it: the table of fields is stricter with these."""


class StreamOptions(Declared):
    """What a stream has besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class FunctionSpec(Declared):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Declared):
    """A tool of a body's `tools`."""

    type: str
    function: FunctionSpec | None = None


class JsonSchemaFormat(Declared):
    """The schema of an answer, as `response_format` has it."""

    schema: Any = None
    name: Any = None
    description: Any = None
    strict: Any = None


class ResponseFormat(Declared):
    """The fields of `response_format`, of all its types. `server.api.request.grammars` reads them."""

    raw_types: ClassVar[RawTypes] = {"json_schema": JsonSchemaFormat}

    type: Any = None
    json_schema: Any = None
    schema: Any = None
    format: Any = None
    structures: Any = None
    triggers: Any = None


class SamplingParameters(Generates, kw_only=True):
    """What steers the draw of tokens. None: not given."""

    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], STOPS] | None = None
    # beyond OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], WORDS] | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: Annotated[list[int], TOKENS] | None = None
    bad_words: Annotated[list[str], WORDS] | None = None
    structured_outputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # `server.api.request.grammars` reads it


class CommonFields(SamplingParameters, kw_only=True):
    """What all routes that generate share, Anthropic's excepted."""

    model: str | None = None
    stream: bool | None = False
    # beyond OpenAI's
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Priority | None = None
    service_tier: str | None = None  # `flex`: without targets, in what the others leave; other values have no effect
    slo: LatencyTargets | None = None
    timeout_s: float | None = None
    cache_salt: str | None = None
    truncation_side: Side | None = None


class SamplingFields(CommonFields, kw_only=True):
    """What chat and completions share."""

    raw_types: ClassVar[RawTypes] = {"response_format": ResponseFormat}  # the types of Raw fields

    stream_options: StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    # beyond OpenAI's
    use_beam_search: bool | None = None  # of `n` beams
    length_penalty: Penalty | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Annotated[list[int], ASKED] | None = None
    sampled_logprobs: bool | None = None
    return_logprobs_by_id: bool | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_draft_counts: bool | None = None
    return_weight_versions: bool | None = None
    # `server.api.request.grammars` reads these
    response_format: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    guided_json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    guided_regex: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    guided_choice: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    guided_grammar: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ContentPart(Declared):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Declared):
    """The function that a tool call names, and its arguments."""

    name: str
    arguments: str | dict[str, Any] | None = None  # JSON text or an object


class ToolCall(Declared):
    """A tool call in an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(Declared):
    """One message of the conversation."""

    role: str
    content: str | Annotated[list[ContentPart], ITEMS] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], ITEMS] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None  # the older form of `tool_calls`
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it


class ChatFields(SamplingFields, kw_only=True):
    """What chats share, besides their messages."""

    raw_types: ClassVar[RawTypes] = {"response_format": ResponseFormat, "tools": ToolSpec}

    max_completion_tokens: int | None = None
    echo: bool | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # read by `template_variables`
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # read by `template_variables`
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # `read_tools` reads them
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Budget | None = None


class ChatRequest(ChatFields, kw_only=True):
    """The body of a chat completion."""

    messages: Annotated[list[Message], ITEMS]


class BatchChatRequest(ChatFields, kw_only=True):
    """The body of a chat completion of several conversations."""

    messages: Annotated[list[Annotated[list[Message], ITEMS]], ITEMS]

    def each(self) -> list[ChatRequest]:
        """The bodies of the same request about each conversation."""
        fields = {name: getattr(self, name) for name in ChatFields.__struct_fields__}
        return [ChatRequest(messages=messages, **fields) for messages in self.messages]


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of a completion."""

    prompt: Prompts | None = None
    echo: bool | None = False
    logprobs: int | None = None
    # beyond OpenAI's
    detokenize: bool | None = None  # False: the answer has no text
    fills_context: bool | None = None  # whether the output may fill the context if there is no `max_tokens`


class EmbedFields(Declared, kw_only=True):
    """What the routes share whose answers are made of embeddings."""

    model: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    priority: Priority | None = None
    timeout_s: float | None = None
    cache_salt: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None  # vLLM's newer name of `normalize`
    request_id: str | None = None  # without effect


class EmbeddingRequest(EmbedFields, kw_only=True):
    """The body of a request for embeddings, and of one to `/pooling`."""

    input: Prompts | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    return_token_ids: bool | None = None  # those of each input


class ScoreRequest(EmbedFields, kw_only=True):
    """The body of a request to compare texts: one with all others, or each with the one at its place."""

    text_1: str | Annotated[list[str], ITEMS] | None = None
    text_2: str | Annotated[list[str], ITEMS] | None = None
    queries: str | Annotated[list[str], ITEMS] | None = None  # newer names of the two
    documents: str | Annotated[list[str], ITEMS] | None = None


class Document(Declared):
    """A document to rank."""

    text: str


class RerankRequest(EmbedFields, kw_only=True):
    """The body of a request to rank documents by their similarity to a query."""

    query: str
    documents: Annotated[list[str | Document], ITEMS]
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None  # None or 0: all
    return_documents: bool | None = None  # None: true


class TokenizeRequest(Declared, kw_only=True):
    """The body of `/tokenize`: a text or a conversation."""

    raw_types: ClassVar[RawTypes] = {"tools": ToolSpec}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], ITEMS] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class DetokenizeRequest(Declared, kw_only=True):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], TOKENS]
    skip_special_tokens: bool | None = None  # None: they are shown
