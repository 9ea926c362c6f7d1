"""The parts of `transformers` that the server uses.

Import this module inside functions: the import takes most of a second, and the HTTP port is bound before. Nothing here
reads a folder or asks the hub.
"""

from __future__ import annotations

import logging

# On import `transformers` advises to install PyTorch, which nothing here needs.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())

from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode  # noqa: E402
from transformers.utils.chat_template_utils import _compile_jinja_template as compile_jinja_template  # noqa: E402

__all__ = ["TikTokenConverter", "bytes_to_unicode", "compile_jinja_template"]
