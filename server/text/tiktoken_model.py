"""Meta's own form of the Llama 3 tokenizer: a `tokenizer.model` of base64 tokens and ranks, without anything else.

The split pattern and the 256 special tokens are those of Meta's published reference code for Llama 3.1, which are a
superset of Llama 3's by name. The ranks become BPE merges: a token's merges are all the ways of cutting it into two
tokens, in the order of the parts' ranks.
"""

from __future__ import annotations

import base64
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from server.text.byte_alphabet import byte_to_unicode

NUM_SPECIAL_TOKENS = 256
NAMED_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
MAX_TOKEN_BYTES = 1024  # Llama 3's longest has 128; every cut of a token in two is tried
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_from_tiktoken(path: Path) -> Tokenizer:
    """Raises ValueError where the file is not a list of base64 tokens and ranks."""
    ranks = _read_ranks(path)
    printable = byte_to_unicode()
    text = {raw: raw.decode("latin-1").translate(printable) for raw in ranks}
    merges = []
    for raw in sorted(ranks, key=ranks.__getitem__):
        cuts = [(raw[:i], raw[i:]) for i in range(1, len(raw))]
        known = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(text[left], text[right]) for left, right in known]
    vocab = {text[raw]: rank for raw, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens()])
    bos = NAMED_SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def special_tokens() -> list[str]:
    """All 256, in the order of their ids."""
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(3, NUM_SPECIAL_TOKENS)]
    return [*NAMED_SPECIAL_TOKENS, *reserved][:NUM_SPECIAL_TOKENS]


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ValueError(f"{path} is not a tiktoken file of base64 tokens and ranks: {error}") from error
    if sorted(ranks.values()) != list(range(len(lines))):
        raise ValueError(f"{path} is not a tiktoken file: its {len(lines)} ranks are not 0, 1, 2 and so on")
    if max(map(len, ranks), default=0) > MAX_TOKEN_BYTES:
        raise ValueError(f"{path} is not a tiktoken file: a token has more than {MAX_TOKEN_BYTES} bytes")
    return ranks
