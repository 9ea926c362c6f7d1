"""Meta's format of the Llama 3 tokenizer: a `tokenizer.model` that has only base64 tokens and their ranks.

`transformers` converts it to a `tokenizers.Tokenizer`. This module reads the file, strictly and without the package
`tiktoken`. It also adds the special tokens, which the file does not have: the 256 of Meta's reference code for
Llama 3.1. Their names include those of Llama 3.
"""

from __future__ import annotations

import base64
from pathlib import Path

from tokenizers import Tokenizer, processors

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
DEFAULT_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}  # where no file names others
MAX_TOKEN_BYTES = 1024  # Llama 3's longest has 128; the conversion tries every split of a token into two


def tokenizer_from_tiktoken(path: Path) -> Tokenizer:
    """The tokenizer of Meta's file. Raises ValueError if the file is not a list of base64 tokens and ranks."""
    from server.text.transformers_parts import TikTokenConverter

    converter = TikTokenConverter(vocab_file=path, extra_special_tokens=special_tokens())
    converter.load_tiktoken_bpe = _read_ranks
    tokenizer: Tokenizer = converter.converted()
    bos = NAMED_SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def special_tokens() -> list[str]:
    """The 256 special tokens in the order of their ids, which follow those of the file."""
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(3, NUM_SPECIAL_TOKENS)]
    return [*NAMED_SPECIAL_TOKENS, *reserved][:NUM_SPECIAL_TOKENS]


def special_ids(path: Path) -> dict[str, int]:
    """The special tokens' ids. Raises ValueError as `tokenizer_from_tiktoken`."""
    return {token: id for id, token in enumerate(special_tokens(), start=len(_read_ranks(path)))}


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
