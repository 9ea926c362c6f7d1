"""Tokenizer folders for the tests: bytes and a few merges, with Llama 3's special tokens and chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
# without merges
BOS, END_OF_TEXT, START_HEADER, END_HEADER, EOT, PYTHON_TAG = range(256, 262)
VOCAB_SIZE = 262

# The form of Llama 3's conversations, as its model card gives it.
LLAMA3_TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# Templates with tools.
TOOL_TEMPLATE, HERMES_TEMPLATE = (
    Path(__file__).with_name(name).read_text() for name in ("llama_tools.jinja", "hermes_tool_use.jinja")
)
HERMES_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")


def byte_tokenizer(merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """Ids 0 to 255 are the bytes; one id for each merge follows; then the special tokens."""
    # Engines of the tests import this module for its ids only.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    merged = {left + right: 256 + i for i, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=letters | merged, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", BOS)]
    )
    return tokenizer


def write_folder(folder: Path, *, template: str | None = LLAMA3_TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
