"""A tokenizer for models without one (presets with dummy weights), so that they can be served and timed.

Its texts have no meaning, like the output of dummy weights. A prompt has one token per byte. Every id has a text, so
streams and stop strings behave as with a real vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from model.inputs.paths import Place
from model.loading.source import ModelSource, small_files
from server.text.tiktoken_model import special_tokens

# Llama 3's format of turns.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def tokenizer_folder(asked: Place | None, source: ModelSource, spare: Path, revision: str | None = None) -> Path:
    """The folder of the tokenizer: `asked`, the model's own, or, for a preset, a stand-in in the folder `spare`. With
    `revision` it is that of the hub."""
    if asked is not None or revision is not None:
        return small_files(source.name if asked is None else str(asked), revision)
    if source.tokenizer is not None:
        return source.tokenizer
    write_stand_in_tokenizer(spare, source.config.vocab_size)
    return spare


def write_stand_in_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer's files. Its ids are bytes, then made-up words, then Llama 3's special tokens.

    Raises:
        ValueError: the vocabulary cannot hold the bytes and the special tokens.
    """
    specials = special_tokens()
    num_words = vocab_size - 256 - len(specials)
    if num_words < 0:
        raise ValueError(f"a stand-in tokenizer needs {256 + len(specials)} ids or more: {vocab_size=}")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((space, _),) = byte_level.pre_tokenize_str(" ")
    tokens = [*sorted(byte_level.alphabet()), *(f"{space}w{i}" for i in range(num_words))]
    vocab = {token: id for id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    bos = specials[0]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
