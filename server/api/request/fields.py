"""Fields that a request type does not declare: they are refused by name, accepted without effect, or unknown.

A field is refused if the answer would be wrong without it. A refused field is accepted with a value that changes
nothing: null, false, 0, an empty text or list, or a value of `harmless`. A field that only tunes an answer, such as a
level of effort, is accepted with any value, and has no effect. So is a field that is in no table here. The log names
both the first time, and a server with `--strict-fields` refuses them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from server.api.request.schemas import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    Document,
    EmbeddingRequest,
    FunctionCall,
    FunctionSpec,
    JsonSchemaFormat,
    Message,
    RerankRequest,
    ResponseFormat,
    ScoreRequest,
    StreamOptions,
    TokenizeRequest,
    ToolCall,
    ToolSpec,
)


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is not supported, and the values with which it is accepted."""

    why: str  # ends the sentence "FIELD: ..."
    harmless: tuple[Any, ...] = ()  # values that change nothing, besides null, false, 0 and empty ones
    tunes: bool = False  # an answer without it is not wrong: only a strict server refuses the field

    def concerns(self, value: Any) -> bool:
        """Whether the value changes the answer. An empty object may: it can be a schema."""
        return (bool(value) or value == {}) and value not in self.harmless


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldTable:
    """The undeclared fields of one request type."""

    kind: type[msgspec.Struct]
    refused: Mapping[str, Refused] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()  # about accounts, storage or speed: the answer is the same
    inner: Mapping[str, FieldTable] = field(default_factory=dict)  # declared fields that hold objects, or lists of them


NO_OTHER_INPUT = Refused("input other than text is not supported yet", ({},))
_NO_TRANSFER = Refused("K/V move between servers by --kv-role and --prefill-url, not by a request", ({},))
NO_PLUG_INS = Refused("arguments of vLLM's plug-ins are not supported yet", ({},))
_NO_EMBEDDED_CHATS = Refused("embeddings of conversations are not supported yet: there is `input`")
_NO_PROMPTS_OF_INPUTS = Refused("a prompt for each kind of input is not supported yet: put it into the input")
_EFFORTS: tuple[Any, ...] = ("none", {}, {"effort": None}, {"effort": "none"}, {"effort": None, "summary": None})
_NO_EFFORT = Refused("a level of effort is not supported yet", _EFFORTS, tunes=True)
_NO_BUDGET = Refused("chats have `thinking_token_budget` for it", tunes=True)
NO_VERBOSITY = Refused("a level of verbosity is not supported yet: say it in a message", ("medium",), tunes=True)
NO_SHORTER = Refused("making a conversation shorter is not supported yet", tunes=True)
_STRUCTURED = Refused("this way to ask for structured output is not supported yet: there is `structured_outputs`")
NO_BEST_OF = "drawing more sequences than are returned is not supported yet: ask for `n` with `logprobs`, and choose"
_BEAMS = (
    "beam search is not supported yet, for its beams would be new requests at every token: ask for `n` samples with "
    "`logprobs`, and keep the one with the highest sum"
)
_ANOTHER_SAMPLER = "this sampler is not supported yet: there are temperature, top_k, top_p and min_p"

GENERATION = {
    "best_of": Refused(NO_BEST_OF, (1,)),
    "dry_multiplier": Refused(_ANOTHER_SAMPLER),
    "dynatemp_range": Refused(_ANOTHER_SAMPLER),
    "ec_transfer_params": _NO_TRANSFER,
    "early_stopping": Refused(_BEAMS),
    "enable_thinking": Refused("chats have `chat_template_kwargs` for it", tunes=True),
    "grammar": _STRUCTURED,
    "guided_whitespace_pattern": _STRUCTURED,
    "include_reasoning": Refused("only chats tell reasoning from the answer", tunes=True),
    "json_schema": _STRUCTURED,
    "kv_transfer_params": _NO_TRANSFER,
    "length_penalty": Refused(_BEAMS, (1,)),
    "logits_processors": Refused("code that comes with a request is not supported yet; there is `logit_bias`"),
    "logprob_token_ids": Refused("log-probabilities of chosen tokens are not supported yet; there is `logprobs`"),
    "mirostat": Refused(_ANOTHER_SAMPLER),
    "media_io_kwargs": NO_OTHER_INPUT,
    "mm_processor_kwargs": NO_OTHER_INPUT,
    "n_cmpl": Refused("this name of `n` is not supported yet", (1,)),
    "n_predict": Refused("this name of `max_tokens` is not supported yet", (-1,)),
    "n_probs": Refused("this name of `logprobs` is not supported yet"),
    "prompt_token_ids": Refused("a chat as token ids is not supported yet: /v1/completions has `prompt` for them"),
    "reasoning": _NO_EFFORT,
    "reasoning_budget_tokens": _NO_BUDGET,
    "reasoning_effort": _NO_EFFORT,
    "repeat_penalty": Refused("this name of `repetition_penalty` is not supported yet", (1,)),
    "repetition_detection": Refused("ending outputs that repeat themselves is not supported yet"),
    "return_mm_kwargs": NO_OTHER_INPUT,
    "return_prompt_text": Refused("the prompt's text is not shown yet: there are `return_token_ids` and /detokenize"),
    "return_token_offsets": Refused("places of the prompt's tokens are not shown yet"),
    "return_tokens": Refused("this name of `return_token_ids` is not supported yet"),
    "routed_experts_prompt_start": Refused("the model has no experts"),
    "structural_tag": _STRUCTURED,
    "t_max_predict_ms": Refused("this name of `timeout_s` is not supported yet"),
    "tfs_z": Refused(_ANOTHER_SAMPLER, (1,)),
    "thinking": _NO_EFFORT,
    "thinking_token_budget": _NO_BUDGET,
    "top_a": Refused(_ANOTHER_SAMPLER),
    "top_n_sigma": Refused(_ANOTHER_SAMPLER, (-1,)),
    "typical_p": Refused(_ANOTHER_SAMPLER, (1,)),
    "use_beam_search": Refused(_BEAMS),
    "vllm_xargs": NO_PLUG_INS,
    "watermarking": Refused("watermarks are not supported yet"),
    "xtc_probability": Refused(_ANOTHER_SAMPLER),
}

_CHAT = {
    "audio": Refused("audio output is not supported yet"),
    "function_call": Refused("this older form of `tool_choice` is not supported yet", ("none", "auto")),
    "functions": Refused("this older form of `tools` is not supported yet"),
    "moderation": Refused("moderation is not supported yet"),
    "modalities": Refused("output other than text is not supported yet", (["text"],)),
    "verbosity": NO_VERBOSITY,
    "web_search_options": Refused("searching the web is not supported yet"),
}

_COMPLETION = {
    "prompt_embeds": Refused("a prompt of embeddings is not supported yet"),
    "suffix": Refused("inserting text before a suffix is not supported yet"),
}

# Values of other routes' fields that change nothing here, besides those of `Refused`.
_HARMLESS_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "tool_choice": ("none", "auto"),
    "truncation_side": ("left", "right"),
}
# Fields of some routes, and what others have in their place.
_COUNTERPARTS = {
    "input": ("messages", "prompt"),
    "instructions": ("messages", "prompt"),
    "max_completion_tokens": ("max_completion_tokens", "max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "max_tokens": ("max_output_tokens",),
    "messages": ("messages", "input", "prompt"),
    "prompt": ("messages", "input"),
    "previous_response_id": ("messages", "prompt"),
    "response_format": ("text", "output_config"),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "system": ("messages", "instructions", "prompt"),
}


def of_other_routes(kind: type[msgspec.Struct], *, but: Collection[str] = ()) -> dict[str, Refused]:
    """The fields that chats or completions serve or refuse and `kind` does not declare, except `but`. The answer
    without them would be another than was asked for."""
    declared = kind.__struct_fields__
    others = [*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *_COUNTERPARTS]
    refused = {name: _of_another_route(name, declared) for name in others} | GENERATION | _CHAT | _COMPLETION
    return {name: why for name, why in refused.items() if name not in declared and name not in but}


def _of_another_route(name: str, declared: Collection[str]) -> Refused:
    own = next((own for own in _COUNTERPARTS.get(name, ()) if own in declared), None)
    why = "this field of other routes is not supported yet here" if own is None else f"this route has `{own}` for it"
    return Refused(why, _HARMLESS_ELSEWHERE.get(name, ()))


_WITHOUT_EFFECT = frozenset(
    {
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("client_metadata", "safety_identifier", "service_tier", "store", "user"),
        "guided_decoding_backend",  # there is only one
        *("cache_prompt", "id_slot", "session_id"),  # where K/V is kept
        *("sse_ping_interval", "stream_interval", "timings_per_token"),  # how an answer is cut into events
        "spaces_between_special_tokens",  # byte-level tokens include their spaces
    }
)

_STREAM_OPTIONS = FieldTable(kind=StreamOptions, without_effect=frozenset({"include_obfuscation"}))
# a part that is not text is refused because of its `type`
_CONTENT_PART = FieldTable(
    kind=ContentPart,
    without_effect=frozenset({"annotations", "cache_control", "file", "image_url", "input_audio"}),
)
_FUNCTION_CALL = FieldTable(kind=FunctionCall)
_TOOL_CALL = FieldTable(kind=ToolCall, without_effect=frozenset({"index"}), inner={"function": _FUNCTION_CALL})
_MESSAGE = FieldTable(
    kind=Message,
    refused={
        "audio": Refused("audio is not supported yet"),
    },
    without_effect=frozenset({"annotations"}),
    inner={"content": _CONTENT_PART, "function_call": _FUNCTION_CALL, "tool_calls": _TOOL_CALL},
)

_JSON_SCHEMA = FieldTable(kind=JsonSchemaFormat)
_RESPONSE_FORMAT = FieldTable(kind=ResponseFormat, inner={"json_schema": _JSON_SCHEMA})
TOOL_WITHOUT_EFFECT = frozenset({"cache_control"})
_TOOL = FieldTable(
    kind=ToolSpec,
    without_effect=TOOL_WITHOUT_EFFECT,
    inner={"function": FieldTable(kind=FunctionSpec, without_effect=TOOL_WITHOUT_EFFECT)},
)

CHAT_FIELDS = FieldTable(
    kind=ChatRequest,
    refused=of_other_routes(ChatRequest, but=_WITHOUT_EFFECT),
    without_effect=_WITHOUT_EFFECT,
    inner={
        "messages": _MESSAGE,
        "response_format": _RESPONSE_FORMAT,
        "stream_options": _STREAM_OPTIONS,
        "tools": _TOOL,
    },
)
BATCH_CHAT_FIELDS = replace(CHAT_FIELDS, kind=BatchChatRequest)
COMPLETION_FIELDS = FieldTable(
    kind=CompletionRequest,
    refused=of_other_routes(CompletionRequest, but=_WITHOUT_EFFECT),
    without_effect=_WITHOUT_EFFECT,
    inner={"response_format": _RESPONSE_FORMAT, "stream_options": _STREAM_OPTIONS},
)
_EMBEDDING = {
    "chat_template": _NO_EMBEDDED_CHATS,
    "embed_dtype": Refused("numbers of another type are not supported yet", ("float32",)),
    "endianness": Refused("another order of bytes is not supported yet", ("little", "native")),
    "input_type": _NO_PROMPTS_OF_INPUTS,
    "instruction": _NO_PROMPTS_OF_INPUTS,
    "messages": _NO_EMBEDDED_CHATS,
    "mm_processor_kwargs": NO_OTHER_INPUT,
    "padding": Refused("padding of inputs is not supported yet", ("do_not_pad",)),
    "pooling_type": Refused("the pooling is chosen at the server's start: --pooling-type"),
    "prompt_name": _NO_PROMPTS_OF_INPUTS,
    "softmax": Refused("scores of classes are not supported: the model has none", (True,)),
}
_WITHOUT_EFFECT_ON_VECTORS = frozenset({"user", "request_id"})
EMBEDDING_FIELDS = FieldTable(
    kind=EmbeddingRequest,
    refused=_EMBEDDING
    | {"prompt": Refused("this route has `input` for it"), "task": Refused("there is one task", ("embed", "encode"))},
    without_effect=_WITHOUT_EFFECT_ON_VECTORS,
)
SCORE_FIELDS = FieldTable(kind=ScoreRequest, refused=_EMBEDDING, without_effect=_WITHOUT_EFFECT_ON_VECTORS)
RERANK_FIELDS = FieldTable(
    kind=RerankRequest,
    refused=_EMBEDDING | {"max_chunks_per_doc": Refused("documents are not cut into chunks", (1,))},
    without_effect=_WITHOUT_EFFECT_ON_VECTORS,
    inner={"documents": FieldTable(kind=Document)},
)
TOKENIZE_FIELDS = FieldTable(
    kind=TokenizeRequest,
    refused={
        "content": Refused("this route has `prompt` for it"),
        "media_io_kwargs": NO_OTHER_INPUT,
        "mm_processor_kwargs": NO_OTHER_INPUT,
        "tool_choice": Refused(
            "a choice among the tools is not supported yet here: leave out what is not to count", ("auto",)
        ),
        "truncate_prompt_tokens": Refused("cutting the prompt is not supported yet here"),
    },
    inner={"messages": _MESSAGE, "tools": _TOOL},
)
DETOKENIZE_FIELDS = FieldTable(
    kind=DetokenizeRequest,
    refused={"skip_special_tokens": Refused("special tokens are always shown here")},
)
