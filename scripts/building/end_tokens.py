"""The tokens that end an answer, by one rule for folders and GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model.loading.source import ModelSource
from server.text.named_tokens import read_named_tokens

# The names of Llama 3 and ChatML. An added token of such a name ends a text, a message or a turn in every model.
NAMES = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>")
_MOST_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class EndToken:
    """A token that ends an answer."""

    id: int
    text: str | None  # None: the tokenizer has no name for it
    origin: str  # the file or rule that makes it an end token, in words

    def __str__(self) -> str:
        return f"{self.id if self.text is None else self.text} ({self.origin})"


def find_end_tokens(source: ModelSource, tokenizer: Path | None = None) -> tuple[EndToken, ...]:
    """Every end token of a model, each id once.

    As in vLLM these are the ids of `generation_config.json`, or else of `config.json`, and the tokenizer's `eos_token`,
    because a fine-tune of a base model often changes only the tokenizer. As in llama.cpp the tokens of `NAMES` are end
    tokens, too, because many fine-tunes use a template whose end-of-turn token is in no file.

    Args:
        tokenizer: a folder or a GGUF file; None: the model's own.

    Raises:
        ValueError: the tokenizer's files cannot be read.
    """
    path = tokenizer or source.path
    named = None if path is None else read_named_tokens(path)
    added = {} if named is None else named.added
    texts = {id: text for text, id in added.items()}
    found = [(id, texts.get(id), source.eos_origin) for id in source.eos_token_ids]
    if named is not None and named.eos is not None:
        eos_token, eos_id = named.eos
        found.append((eos_id, eos_token, "the tokenizer's eos_token"))
    found += [(added[name], name, "its name") for name in NAMES if name in added]
    first: dict[int, EndToken] = {}
    for id, text, origin in found:
        if 0 <= id < source.config.vocab_size:  # the model never draws another one
            first.setdefault(id, EndToken(id=id, text=text, origin=origin))
    return tuple(first.values())


def listed(tokens: Sequence[EndToken]) -> str:
    """The end tokens and their origins as text, for the report of the start."""
    if not tokens:
        return "none: an answer ends at max_tokens or at a stop string"
    more = f" and {len(tokens) - _MOST_SHOWN} more" if len(tokens) > _MOST_SHOWN else ""
    return ", ".join(map(str, tokens[:_MOST_SHOWN])) + more
