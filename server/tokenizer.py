"""Text to ids and ids to bytes, from a checkpoint's `tokenizer.json`.

Two facts shape this file. Special tokens are never recognised inside plain text: the caller says where they are
(`encode_parts`), so that no user can type one. And every id has a fixed byte string, so that a stream of ids is decoded
one look-up per token, without ever decoding the same text twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from server.byte_alphabet import unicode_to_byte
from server.tiktoken_model import tokenizer_from_tiktoken

LONG_TEXT_CHARS = 20_000  # from here on encoding takes so long (10 ms) that it is worth a thread of its own


class Tokenizer(Protocol):
    """What the server asks of a tokenizer. `ByteLevelTokenizer` is the real one."""

    token_bytes: Sequence[bytes]  # by id; b"" for ids that mean nothing
    special_ids: frozenset[int]
    special_tokens: dict[str, int]
    max_token_chars: int  # no token stands for more characters of text than this
    template_variables: dict[str, str]  # bos_token, eos_token and so on
    chat_template: str | None

    def encode_plain(self, texts: list[str]) -> list[list[int]]:
        """Each text's ids; what looks like a special token is text like any other. Releases the GIL where they are
        long together (LONG_TEXT_CHARS)."""

    def with_affixes(self, ids: list[int]) -> list[int]:
        """The ids with what the tokenizer adds around a text of its own accord (Llama 3: begin-of-text)."""


class ByteLevelTokenizer:
    """A byte-level BPE tokenizer (Llama 3's kind) from a checkpoint folder. Anything else is a ValueError."""

    def __init__(self, backend: tokenizers.Tokenizer, *, config: dict[str, Any], chat_template: str | None) -> None:
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError(f"the tokenizer is not a byte-level BPE one: {type(backend.decoder).__name__=}")
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: id for id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        self.token_bytes = _token_bytes(backend, {token.content: id for id, token in added.items()})
        self.max_token_chars = max(len(raw) for raw in self.token_bytes)
        self.template_variables = _template_variables(config)

    @classmethod
    def from_folder(cls, folder: Path) -> ByteLevelTokenizer:
        """Reads `tokenizer.json` (or a tiktoken-style `tokenizer.model`), `tokenizer_config.json` and the template.

        Raises ValueError where there is none, or none of this kind.
        """
        config = _read_json(folder / "tokenizer_config.json")
        special_map = _read_json(folder / "special_tokens_map.json")
        if (folder / "tokenizer.json").is_file():
            backend = _read_backend(folder / "tokenizer.json")
        elif (folder / "tokenizer.model").is_file():
            backend = tokenizer_from_tiktoken(folder / "tokenizer.model")
            special_map = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"} | special_map
        else:
            raise ValueError(f"{folder} holds neither tokenizer.json nor tokenizer.model")
        return cls(backend, config=special_map | config, chat_template=_chat_template(folder, config))

    def encode_plain(self, texts: list[str]) -> list[list[int]]:
        # A batch is handed to the library's threads: on a busy machine that takes longer than to encode short texts.
        if sum(map(len, texts)) < LONG_TEXT_CHARS:
            return [self._backend.encode(text, add_special_tokens=False).ids for text in texts]
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def with_affixes(self, ids: list[int]) -> list[int]:
        before, after = self._affixes
        return [*before, *ids, *after]

    @cached_property
    def _affixes(self) -> tuple[list[int], list[int]]:
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return full[:start], full[start + len(bare) :]


def special_token_pattern(special_tokens: Iterable[str]) -> re.Pattern[str]:
    """Splits text at special tokens, leftmost and longest first, keeping them (one group)."""
    alternatives = sorted(special_tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, alternatives)) + ")") if alternatives else re.compile("((?!))")


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{path} is not a tokenizer that can be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The file wins over the field, as in transformers. Of several named templates, the one called default."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _template_variables(config: dict[str, Any]) -> dict[str, str]:
    variables = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            variables[name] = value
    return variables


def _token_bytes(backend: tokenizers.Tokenizer, added: dict[str, int]) -> list[bytes]:
    to_byte = unicode_to_byte()
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    for token, id in vocab.items():
        raw = token.encode() if token in added else token.translate(to_byte).encode("latin-1")
        table[id] = raw
    return table
