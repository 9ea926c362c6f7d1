"""Byte-level BPE as Llama 3 has it: the letters that stand for bytes, and how a text is cut before it is merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OWN_LETTERS = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))  # of Latin-1: visible, and no soft hyphen


def byte_letters() -> list[str]:
    """The letter of each byte in a vocabulary, since GPT-2. Visible letters of Latin-1 stand for their own byte, and
    the letters from U+0100 on for the other bytes in their order."""
    others = count(0x100)
    return [chr(byte if byte in _OWN_LETTERS else next(others)) for byte in range(256)]


def llama3_tokenizer(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """Without added tokens. A word of the vocabulary is one token, also if the merges do not lead to it."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
