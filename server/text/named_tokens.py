"""The ids of a tokenizer's added tokens and of its `eos_token`, from its files.

The tokenizer itself is not built: Llama 3's takes 0.4 s and holds the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from model.inputs.gguf import is_gguf
from model.inputs.json_file import check_size
from model.inputs.limits import MAX_TOKENIZER_BYTES
from server.text.gguf_tokenizer import added_gguf_tokens
from server.text.tiktoken_model import DEFAULT_TOKENS, special_ids
from server.text.tokenizer_files import special_tokens


@dataclass(frozen=True, kw_only=True)
class NamedTokens:
    """A tokenizer's named tokens. An id may be outside the model's vocabulary."""

    added: Mapping[str, int]  # the tokens that are added to the vocabulary of text, by text
    eos: tuple[str, int] | None  # None: the tokenizer names no eos_token, or does not have the one that it names


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _TokenizerFile(msgspec.Struct):
    """The fields of `tokenizer.json` that are read here."""

    added_tokens: list[_Added] = []
    model: _Model = msgspec.field(default_factory=_Model)


def read_named_tokens(path: Path) -> NamedTokens:
    """Reads the named tokens of a model's folder or GGUF file. Without a tokenizer there are none.

    Raises ValueError if a file cannot be read.
    """
    if is_gguf(path):
        added, eos = added_gguf_tokens(path)
        return NamedTokens(added=added, eos=eos)
    if (file := path / "tokenizer.json").exists():
        return _from_json(file, special_tokens(path).get("eos_token"))
    if (file := path / "tokenizer.model").exists():
        check_size(file, MAX_TOKENIZER_BYTES)
        added = special_ids(file)
        eos_token = (DEFAULT_TOKENS | special_tokens(path)).get("eos_token", "")
        return NamedTokens(added=added, eos=(eos_token, added[eos_token]) if eos_token in added else None)
    return NamedTokens(added={}, eos=None)


def _from_json(path: Path, eos_token: str | None) -> NamedTokens:
    check_size(path, MAX_TOKENIZER_BYTES)
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
        added = {token.content: token.id for token in file.added_tokens}
        ids = added
        if eos_token is not None and eos_token not in added:
            ids = msgspec.json.decode(file.model.vocab, type=dict[str, int])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not a tokenizer that can be read: {error}") from error
    return NamedTokens(
        added=added, eos=None if eos_token is None or eos_token not in ids else (eos_token, ids[eos_token])
    )
