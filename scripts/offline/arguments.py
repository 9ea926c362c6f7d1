"""Converts the arguments of `LLM`'s methods, which have vLLM's forms, to request bodies."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, Required, Self, TypedDict, get_type_hints

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")
_EITHER = "'prompt' (a text) or 'prompt_token_ids' (a list of ids)"


class TextPrompt(TypedDict, total=False):
    """A prompt as a text."""

    prompt: Required[str]
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids."""

    prompt_token_ids: Required[list[int]]
    prompt: str | None
    cache_salt: str


class RequestOutputKind(Enum):
    """What `AsyncLLM.generate` yields."""

    CUMULATIVE = 0  # the whole output so far, after each step
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # the whole output, once


class StructuredOutputsParams(TypedDict, total=False):
    """The grammar of an output. One of the fields says which."""

    json: str | dict[str, Any] | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    json_object: bool | None
    structural_tag: str | None


class PoolingParams(TypedDict, total=False):
    """The parameters of a request for a vector."""

    use_activation: bool | None
    dimensions: int | None
    task: str | None


@dataclass
class SamplingParams:
    """vLLM's parameters of a request, with vLLM's names, order and defaults. The server checks the values.

    A mapping of an OpenAI body's fields may be used instead. Fields that are not in it then have the model's own
    defaults (generation_config).
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as fit
    min_tokens: int = 0
    logprobs: int | None = None  # the number of most likely tokens that are reported with each token
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None  # the tokens that are reported with each token, instead
    flat_logprobs: bool = False
    detokenize: bool = True  # False: the results have no texts
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    best_of: int | None = None
    truncate_prompt_tokens: int | None = None
    sampled_logprobs: bool = False  # of each token, in the distribution from which it was drawn

    @classmethod
    def from_optional(cls, **parameters: Any) -> Self:
        """The parameters, with the defaults in place of None."""
        return cls(**{name: value for name, value in parameters.items() if value is not None})

    def clone(self) -> Self:
        """A copy that shares nothing with this object."""
        return copy.deepcopy(self)

    def body(self, *, is_chat: bool) -> dict[str, Any]:
        """The fields of a request body. Raises ValueError for a chat with `detokenize` false."""
        if is_chat and not self.detokenize:
            raise ValueError("detokenize=False: a chat is answered with texts: give generate() token ids")
        # Not `asdict`, which would copy long lists.
        names = (entry.name for entry in dataclasses.fields(self) if entry.name not in _OF_RESULTS)
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        fields["max_tokens"] = self.max_tokens
        if self.detokenize:
            del fields["detokenize"]
        if is_chat and self.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": self.logprobs}
        return fields


_OF_RESULTS = ("flat_logprobs", "output_kind", "skip_clone", "spaces_between_special_tokens", "stream_interval")


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter of a request, with vLLM's fields. `lora_path` is loaded when the name is first used, or is used
    with another path. With `load_inplace` it is always loaded. `lora_int_id` has no effect here."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False


Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Mapping[str, Any]
AllParams = Params | Sequence[Params | None] | None
LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None


class Options(TypedDict, total=False):
    """Further arguments of the methods of `LLM`."""

    use_tqdm: bool  # shows a bar on stderr
    lora_request: LoraRequests  # the LoRA adapter of all prompts, or one for each; needs `enable_lora=True`
    model: str | None  # the name of one of the LLM's `models`; None: the LLM's own
    priority: int | Sequence[int] | None  # of all prompts, or one for each; a lower one runs sooner
    request_id: str  # of the only prompt
    tokenization_kwargs: Mapping[str, Any] | None  # fields of all request bodies, such as `truncate_prompt_tokens`


class ChatOptions(Options, total=False):
    """Further arguments of `LLM.chat`: fields of all request bodies."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    chat_template: str | None  # replaces the model's own
    chat_template_content_format: str | None  # "auto" or "string"
    mm_processor_kwargs: Mapping[str, Any] | None


def fields_of(options: Options | ChatOptions, known: type[Options], count: int) -> list[dict[str, Any]]:
    """The fields of `count` request bodies in the options. Raises TypeError for an unknown one."""
    for name in options.keys() - get_type_hints(known).keys():
        raise TypeError(f"unknown argument {name!r}{nearest(name, get_type_hints(known))}")
    if (form := options.get("chat_template_content_format")) not in (None, "auto", "string"):
        raise ValueError(f"chat_template_content_format={form!r}: templates get the content of a message as one text")
    others = ("use_tqdm", "lora_request", "tokenization_kwargs", "chat_template_content_format")
    own = {name: value for name, value in options.items() if name not in others and value is not None}
    fields = {**(options.get("tokenization_kwargs") or {}), **own}
    priority: Any = own.get("priority")
    if not _is_list(priority):
        return [fields] * count
    if len(priority) != count:
        raise ValueError(f"one priority for all prompts, or one for each: {count} prompts, {len(priority)} of them")
    return [fields | {"priority": each} for each in priority]


def nearest(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names, in words that follow an unknown one."""
    found = get_close_matches(name, known, n=1)
    return f": did you mean {found[0]!r}?" if found else ""


def prompts_of(asked: Prompt | Sequence[Prompt], name: str) -> list[dict[str, Any]]:
    """The body fields of one prompt or several: text or ids in the field `name`, and `cache_salt` if it is given.

    Raises ValueError, with the type or the field, for a value that is not a prompt.
    """
    several: Any = asked
    if isinstance(asked, str | Mapping) or (_is_list(asked) and len(asked) > 0 and isinstance(asked[0], int)):
        several = [asked]
    if not _is_list(several):
        raise ValueError(f"{_type(asked)} is no prompt: give a text, token ids, a dict of them, or a list of prompts")
    return [_prompt(prompt, index, name) for index, prompt in enumerate(several)]


def conversations_of(asked: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """One conversation or several, as a list. Raises ValueError for a value that is not a conversation."""
    is_one = _is_list(asked) and len(asked) > 0 and isinstance(asked[0], Mapping)
    several: Any = [asked] if is_one else asked
    if not _is_list(several):
        raise ValueError(f"{_type(asked)} is no conversation: give a list of messages, or a list of such lists")
    for index, messages in enumerate(several):
        if not _is_list(messages):
            raise ValueError(f"conversation {index}: {_type(messages)} is no list of messages")
    return [list(messages) for messages in several]


def paired(items: Sequence[Any], params: AllParams, *, is_chat: bool) -> list[Any]:
    """Each item with the body fields of its parameters. There is one set of parameters for all items, or one for
    each."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        own = [_fields(params, is_chat)] * len(items)
    elif _is_list(params):
        own = [_fields(one, is_chat) for one in params]
    else:
        raise ValueError(f"{_type(params)} is no set of parameters: give SamplingParams, or a dict of body fields")
    if len(own) != len(items):
        raise ValueError(f"one set of parameters for all, or one for each: {len(items)=} {len(own)=}")
    return list(zip(items, own, strict=True))


def adapters_of(requests: LoraRequests, count: int) -> list[LoRARequest | None]:
    """The adapter of each of `count` prompts. There is one adapter for all prompts, or one for each. Raises
    ValueError."""
    if requests is None or isinstance(requests, LoRARequest):
        return [requests] * count
    if not _is_list(requests) or not all(isinstance(one, LoRARequest | None) for one in requests):
        raise ValueError(f"{_type(requests)} names no adapter: give a LoRARequest, or a list with one for each prompt")
    if len(requests) != count:
        raise ValueError(f"one lora_request for all, or one for each: {count} prompts, {len(requests)} of them")
    paths: dict[str, str] = {}
    for one in filter(None, requests):
        if paths.setdefault(one.lora_name, one.lora_path) != one.lora_path:
            raise ValueError(
                f"lora_request: {one.lora_name!r} has two paths, {paths[one.lora_name]} and {one.lora_path}"
            )
    return list(requests)


def _prompt(prompt: Any, index: int, name: str) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {name: prompt}
    if not isinstance(prompt, Mapping):
        return {name: _ids(prompt, f"prompt {index}")}
    others = [field for field, value in prompt.items() if field not in _PROMPT_FIELDS and value is not None]
    if others:
        raise ValueError(f"prompt {index}: {', '.join(map(repr, others))} cannot be served: use {_EITHER}")
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if ids is None and not isinstance(text, str):
        raise ValueError(f"prompt {index}: a dict holds {_EITHER}, not {_type(text)} as its prompt")
    found = {name: text if ids is None else _ids(ids, f"prompt {index}: prompt_token_ids")}
    return found if prompt.get("cache_salt") is None else found | {"cache_salt": prompt["cache_salt"]}


def _ids(ids: Any, where: str) -> list[int]:
    if not _is_list(ids):
        raise ValueError(f"{where}: {_type(ids)} is no prompt: give a text, a list of token ids, or a dict of them")
    wrong = next((entry for entry in ids if not isinstance(entry, int) or isinstance(entry, bool)), None)
    if wrong is not None:
        raise ValueError(f"{where}: a token id is an int, not {_type(wrong)}")
    return list(ids)


def _fields(params: Any, is_chat: bool) -> dict[str, Any]:
    if isinstance(params, SamplingParams):
        return params.body(is_chat=is_chat)
    if params is not None and not isinstance(params, Mapping):
        raise ValueError(f"{_type(params)} is no set of parameters: give SamplingParams, or a dict of body fields")
    fields = dict(params or {})
    if fields.get("stream"):
        raise ValueError("offline results come whole: stream=True is for the HTTP server")
    return fields


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _type(value: Any) -> str:
    return f"a value of type {type(value).__name__}"
