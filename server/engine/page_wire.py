"""The messages by which an engine takes pages from another one: ZeroMQ over TCP, from a DEALER to a ROUTER.

To the engine that has them: `token, index` asks for a page of a prompt, and `token` alone says that no more of it are
wanted. The answer is `token, index, checksum, tokens, page`, or `token, index` if the page will never be there. Answers
may come in another order. Whoever has no token gets nothing: it is drawn for each prompt, and told over HTTP.
"""

from __future__ import annotations

from struct import Struct

TOKEN_BYTES = 16
INDEX = Struct("<I")
CHECKSUM = Struct("<Q")
MAX_ASKED_BYTES = 64  # of a frame of a question
WINDOW = 8  # pages that are asked for ahead, so that the network is busy while a page is checked
