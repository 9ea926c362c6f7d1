"""The table of fields that request types do not declare. They are other names of declared fields, refused, or ignored.

A field is refused if the answer would be wrong without it. It is accepted with a value that changes nothing: null,
false, 0, an empty text or list, or a value of HARMLESS. A field that only tunes an answer, such as a level of effort,
is accepted with any value and has no effect. The same applies to a field that is not in the table. The log names both
kinds once, and a server with `--strict-fields` refuses them.

The name of an inner object's field in the table is its path, without positions in lists.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from server.api.request.schemas import ChatRequest, CompletionRequest, Generates

# Names of one field. A route that declares one of them serves it by the others, too.
_SYNONYMS = """
    max_tokens max_completion_tokens max_output_tokens max_new_tokens num_predict n_predict
    cache_salt extra_key
    guided_choice choice
    guided_grammar grammar ebnf
    guided_json json_schema schema
    guided_regex regex
    include_stop_str_in_output no_stop_trim
    min_tokens min_new_tokens
    n n_cmpl num_return_sequences
    repetition_penalty repeat_penalty
    request_id rid
    return_token_ids return_tokens
    seed random_seed sampling_seed
    stop stop_sequences stop_strings stop_words
    truncate_prompt_tokens truncate
"""
SYNONYMS = {name: tuple(names.split()) for names in _SYNONYMS.strip().splitlines() for name in names.split()}

# Fields of another form that a route may have in place of one. The first that it declares is named.
_COUNTERPARTS = {
    "content": "prompt messages",
    "context": "prompt messages input",
    "input": "messages prompt",
    "input_ids": "prompt token_ids",
    "inputs": "messages prompt input",
    "instructions": "messages prompt",
    "logprob_token_ids": "logprobs",
    "messages": "input prompt",
    "n_probs": "logprobs",
    "output_config": "response_format text",
    "parallel_tool_calls": "tool_choice",
    "previous_response_id": "messages prompt",
    "prompt": "messages input",
    "prompt_token_ids": "token_ids prompt",
    "reasoning_budget_tokens": "thinking_token_budget",
    "response_format": "text output_config",
    "return_full_text": "echo",
    "return_logprob": "logprobs",
    "system": "messages instructions prompt",
    "temperature": "sampling_params",
    "text": "response_format output_config",
    "thinking_budget": "thinking_token_budget",
    "top_logprobs_num": "logprobs",
    "top_n_tokens": "logprobs",
}

NO_BEST_OF = "drawing more sequences than are returned is not supported yet: ask for `n` with `logprobs`, and choose"
_BEAMS = "beam search is not supported yet: ask for `n` samples with `logprobs`, and keep the one with the highest sum"
_SAMPLER = "this sampler is not supported yet: there are temperature, top_k, top_p, min_p and penalties"
_NO_GROUP = 'collectives of NCCL are not supported: weights come by "shared_memory" or "path"'
_NO_HANDLES = "handles of CUDA's memory are not supported: there is `shared_memory`"
_NO_NETWORK = "arrays come in shared memory of this machine; from another one, weights come by `path`"

# Refused by the routes that generate: why, and the names.
_GENERATING = {
    NO_BEST_OF: "best_of",
    _BEAMS: """beam_search_diversity_rate beam_width constraints diversity_penalty early_stopping force_words_ids
        length_penalty num_beam_groups num_beams use_beam_search""",
    _SAMPLER: """adaptive_target banned_strings begin_suppress_tokens dola_layers dry_multiplier dynatemp_range
        encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
        exponential_decay_length_penalty guidance_scale min_keep mirostat mirostat_mode negative_prompt
        negative_prompt_ids no_repeat_ngram_size penalty_alpha repetition_ngram_size samplers sequence_bias skew
        smoothing_factor temperature_last tfs tfs_z top_a top_h top_n_sigma top_p_decay top_p_min top_p_reset_ids
        typical typical_p xtc_probability""",
    "a greedy answer has `temperature` 0": "do_sample",
    "code that comes with a request is not supported yet; there is `logit_bias`": """custom_logit_processor
        custom_params logit_processors logits_processor logits_processors""",
    "there are `logit_bias`, `allowed_token_ids` and `bad_words`": """bad_words_ids custom_token_bans embedding_bias
        forced_bos_token_id forced_decoder_ids forced_eos_token_id suppress_tokens""",
    "there are `stop`, `stop_token_ids` and `max_tokens`": """bad_stop_words end_id eos_token_id max_length max_time
        min_length n_indent repetition_detection stop_regex stopping_criteria t_max_predict_ms""",
    "the context is the server's, and is not shifted": "context_shift n_keep num_ctx num_keep",
    "there are `response_format`, `structured_outputs` and `guided_*`": """format grammar_lazy grammar_triggers
        guided_decoding guided_whitespace_pattern guideline output_format structural_tag""",
    "there are `logprobs`, `prompt_logprobs` and `return_token_ids`": """decoder_input_details details
        logprob_start_len logprob_token_ids output_attentions output_hidden_states output_logits output_scores
        post_sampling_probs prompt_ignore_length response_fields return_context_logits return_generation_logits
        return_hidden_states return_logits return_ppl return_prompt_text return_routed_experts return_token_offsets
        routed_experts_prompt_start token_ids_logprob""",
    "there is `chat_template`, for a server with --trust-request-chat-template": "prompt_template raw template",
    "the prompt is changed by nothing but `truncate_prompt_tokens`": """plugins prompt_mode safe_prompt token_healing
        transforms""",
    "inserting text before a suffix is not supported yet": "input_extra input_prefix input_suffix suffix",
    "output other than text is not supported yet": "audio modalities",
    "reasoning is told from the answer by --reasoning-parser": "reasoning_format separate_reasoning",
    "calls are told from the answer by --tool-call-parser": "parse_tool_calls",
    "this older form of `tools` and `tool_choice` is not supported yet": "function_call functions",
    "moderation is not supported yet": "moderation",
    "searching the web is not supported yet": "search_parameters web_search_options",
    "only /v1/responses has it": "background conversation",
    "messages in the template's form are not supported yet": "enable_response_messages previous_input_messages",
    "texts are in /v1/completions, with token ids by `return_token_ids`": "output_mode",
    "a grammar begins with the first token": "reasoning_ended",
    "it is the server's": "sampling_params.structured_outputs_config",
    "there is `cache_salt` for it": "sampling_params.skip_reading_prefix_cache skip_reading_prefix_cache",
}
# Refused by all routes.
_ANYWHERE = {
    "adapters are named by `model`": """adapter_id adapter_name adapter_source adapters lora lora_id lora_name lora_path
        lora_request loras""",
    "input other than text is not supported yet": """audio_data content_parts features image_data images input_embeds
        media_io_kwargs messages.audio mm_processor_kwargs multi_modal_data prompt_embeds return_mm_kwargs
        video_data""",
    "K/V move between servers by --kv-role and --prefill-url, not by a request": """bootstrap_host bootstrap_room
        disaggregated_params ec_transfer_params kv_transfer_params migration_request session_params""",
    "arguments of vLLM's plug-ins are not supported yet": "extra_args sampling_params.extra_args vllm_xargs",
    "what it holds are fields of the body itself": "generation_config options parameters sampling_params",
    "watermarks are not supported yet": "watermark watermarking watermarking_config",
    "running code is not supported yet": "container",
    "servers of tools are not supported yet": "mcp_servers",
    "this is not supported yet here": """chat_template instruction input_type prompt_name tool_choice
        truncate_prompt_tokens""",
    "vectors are float32, in this machine's order of bytes, without padding": "embed_dtype endianness padding",
    "the pooling is chosen at the server's start: --pooling-type": "pooling_type",
    "scores of classes are not supported: the model has none": "softmax task",
    "documents are not cut into chunks": "max_chunks_per_doc",
    "files do not expire here: delete them": "output_expires_after",
    _NO_GROUP: "init_info.master_address init_info.master_port init_info.rank_offset init_info.world_size",
    _NO_HANDLES: "update_info.ipc_handles update_info.ipc_handles_pickled",
    _NO_NETWORK: "update_info.transfer",
    "the arrays lie one after the other, each aligned to 64 bytes": "update_info.packed",
}
# An answer without them is not wrong: only a strict server refuses them.
_TUNES = {
    "a level of effort is not supported yet": "output_config.effort reasoning reasoning_effort think thinking",
    "a level of verbosity is not supported yet: say it in a message": "text.verbosity verbosity",
    "making a conversation shorter is not supported yet": "context_management",
    "chats have `thinking_token_budget` for it": """reasoning_budget reasoning_budget_tokens thinking_budget
        thinking_budget_tokens thinking_token_budget""",
    "chats have `chat_template_kwargs` for it": "enable_thinking",
    "only chats tell reasoning from the answer": "include_reasoning",
}
# About accounts, storage or speed, or of no meaning here: the answer is the same.
_IGNORED = frozenset(
    """betas cache_control cache_prompt client_metadata guided_decoding_backend id_slot inference_geo keep_alive
    max_tool_calls metadata prediction prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier
    service_tier session_id spaces_between_special_tokens sse_ping_interval store stream_interval stream_options
    timings_per_token token_offsets use_cache user sampling_params.detokenize sampling_params.flat_logprobs
    sampling_params.include_stop_str_in_output sampling_params.output_kind sampling_params.skip_clone
    sampling_params.skip_special_tokens sampling_params.spaces_between_special_tokens""".split()
)
# The same, at any place inside a body. A part that is not text is refused because of its `type`.
_IGNORED_INSIDE = frozenset(
    """action annotations cache_control caller citations data detail display encrypted_content file file_id image_url
    include_obfuscation index input_audio is_checkpoint_format logprobs media_type phase queries result results
    signature summary thinking url""".split()
)
_NO_EFFORT: tuple[Any, ...] = ("none", {}, {"effort": None}, {"effort": "none"}, {"effort": None, "summary": None})
# Values that change nothing, and the fields. If True is among them, false does.
_HARMLESS: list[tuple[tuple[Any, ...], str]] = [
    (
        (1,),
        """beam_width best_of encoder_repetition_penalty guidance_scale length_penalty max_chunks_per_doc n
        n_cmpl num_beam_groups num_beams num_return_sequences repeat_penalty repetition_penalty tfs tfs_z
        top_p_decay typical typical_p""",
    ),
    (
        ({},),
        """ec_transfer_params kv_transfer_params media_io_kwargs mm_processor_kwargs options parameters
        return_mm_kwargs""",
    ),
    ((True,), "do_sample parallel_tool_calls parse_tool_calls separate_reasoning skip_special_tokens"),
    ((True, False), "add_generation_prompt include_reasoning reasoning_ended softmax"),
    (_NO_EFFORT, "reasoning reasoning_effort think thinking"),
    ((False,), "echo return_weight_versions temperature_last"),
    ((-1,), "n_predict num_predict top_n_sigma"),
    (("none", "auto"), "function_call tool_choice"),
    (("medium",), "text.verbosity verbosity"),
    (("float32",), "embed_dtype"),
    (("little", "native"), "endianness"),
    ((["text"],), "modalities"),
    (("high",), "output_config.effort"),
    (("tokens",), "output_mode"),
    (("do_not_pad",), "padding"),
    (("auto", "deepseek"), "reasoning_format"),
    (({"type": "text"},), "response_format"),
    (("embed", "encode"), "task"),
    (({"format": {"type": "text"}},), "text"),
    (("left", "right"), "truncation_side"),
]
HARMLESS = {name: values for values, names in _HARMLESS for name in names.split()}

_PLACE = re.compile(r"(?:^|(?<=\.))\d+\.")  # in a list


class Refusal(NamedTuple):
    """Why a field is not served."""

    why: str  # the rest of the sentence "FIELD: ..."
    harmless: tuple[Any, ...]
    tunes: bool = False  # whether an answer without it is not wrong: only a strict server refuses the field

    def concerns(self, value: Any) -> bool:
        """Whether the value changes the answer. An empty object does, because it may be a schema."""
        if value is None or value in self.harmless:
            return False
        return bool(value) or value == {} or any(harmless is True for harmless in self.harmless)


def _by_name(rows: dict[str, str]) -> dict[str, str]:
    return {name: why for why, names in rows.items() for name in names.split()}


_WHY_GENERATING, _WHY_ANYWHERE, _WHY_TUNES = map(_by_name, (_GENERATING, _ANYWHERE, _TUNES))
_OF_OTHER_ROUTES = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *SYNONYMS}


def served_name(kind: type[msgspec.Struct], name: str) -> str | None:
    """The declared field for which `name` is another name; None: there is none."""
    return next((other for other in SYNONYMS.get(name, ()) if other in kind.__struct_fields__), None)


def is_ignored(path: str, name: str) -> bool:
    """Whether the field has no effect on any answer. `path` is that of the object: empty, or with a dot at its end."""
    return _PLACE.sub("", path) + name in _IGNORED or (path != "" and name in _IGNORED_INSIDE)


def refusal(kind: type[msgspec.Struct], path: str, name: str) -> Refusal | None:
    """The refusal of an undeclared field in an object of the type `kind`; None: the field is unknown."""
    full = _PLACE.sub("", path) + name
    generates = issubclass(kind, Generates)
    names = (full, name) if generates or not path else (full,)
    harmless = next((HARMLESS[each] for each in names if each in HARMLESS), ())
    why = next((_WHY_TUNES[each] for each in names if each in _WHY_TUNES), None)
    if why is not None and (generates or path):
        return Refusal(why, harmless, tunes=True)
    counterparts = () if path else _COUNTERPARTS.get(name, "").split()
    why = next((f"this route has `{own}` for it" for own in counterparts if own in kind.__struct_fields__), None)
    tables = (_WHY_GENERATING, _WHY_ANYWHERE) if generates or path else (_WHY_ANYWHERE,)
    why = why or next((table[each] for table in tables for each in names if each in table), None)
    if why is None and generates and (name in _OF_OTHER_ROUTES or name in _COUNTERPARTS):
        why = "this field of other routes is not supported yet here"
    return None if why is None else Refusal(why, harmless)
