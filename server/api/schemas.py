"""The request bodies: JSON to typed fields, and errors that name the field at fault.

Unknown fields are accepted and ignored. Fields that are known, would change the answer and are not served here are
declared too, so that `refuse_unsupported` can say so instead of dropping them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from server.http.errors import unsupported


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and completions share. None: not given."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    # beyond OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    # known and refused
    best_of: int | None = None
    use_beam_search: bool | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    truncate_prompt_tokens: int | None = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    return_tokens_as_token_ids: Any = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None  # JSON, or what it stands for


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None  # the older form of `tool_calls`


class ResponseFormat(msgspec.Struct):
    type: str


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # `server.api.template_input` reads it
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # likewise
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # `read_tools` reads them
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # known and refused
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    audio: Any = None
    echo: bool | None = None
    chat_template: str | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None
    response_format: ResponseFormat | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


Body = ChatRequest | CompletionRequest | TokenizeRequest | DetokenizeRequest


def refuse_unsupported(body: SamplingFields) -> None:
    """Raises RequestError 400 for whatever would change the answer and is not served."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "drawing more sequences than are returned is")
    if body.use_beam_search:
        raise unsupported("use_beam_search", "beam search is")
    if body.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "cutting prompts is")
    for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(body, name) is not None:
            raise unsupported(name, "structured output is")
    for name in ("bad_words", "allowed_token_ids", "logits_processors"):
        if getattr(body, name):
            raise unsupported(name, "barring tokens other than by `logit_bias` is")
    if body.return_tokens_as_token_ids:
        raise unsupported("return_tokens_as_token_ids", "naming tokens by their ids is")
    response_format = body.response_format if isinstance(body, ChatRequest | CompletionRequest) else None
    if response_format is not None and response_format.type != "text":
        raise unsupported("response_format", f"the type `{response_format.type}` is")
    if isinstance(body, CompletionRequest) and body.suffix:
        raise unsupported("suffix", "inserting text before a suffix is")
    if isinstance(body, CompletionRequest) and body.prompt_embeds:
        raise unsupported("prompt_embeds", "a prompt of embeddings is")
    if isinstance(body, ChatRequest):
        _refuse_unsupported_chat(body)


def _refuse_unsupported_chat(body: ChatRequest) -> None:
    if body.functions:
        raise unsupported("functions", "this older form of `tools` is")
    if body.function_call not in (None, "none"):
        raise unsupported("function_call", "this older form of `tool_choice` is")
    if body.modalities is not None and body.modalities != ["text"]:
        raise unsupported("modalities", "output other than text is")
    if body.audio is not None:
        raise unsupported("audio", "audio output is")
    if body.echo:
        raise unsupported("echo", "repeating the last message is")
    if body.chat_template:
        raise unsupported("chat_template", "a template that comes with a request is")
