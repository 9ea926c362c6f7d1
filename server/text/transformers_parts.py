"""The parts of `transformers` that the server uses.

Import this module inside functions: the import takes most of a second, and the HTTP port is bound first. These parts
read no model folder and make no requests to the Hugging Face hub.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as FastTokenizer

# On import `transformers` logs advice to install PyTorch. The server does not need it.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())

from transformers.convert_slow_tokenizer import TikTokenConverter  # noqa: E402

__all__ = ["FastTokenizer", "TikTokenConverter", "fast_tokenizer"]


def fast_tokenizer(**fields: Any) -> FastTokenizer:
    """The class is imported here: the server does not use it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(**fields)
