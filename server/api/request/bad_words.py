"""`bad_words` as token ids, in vLLM's way: each word as it stands where a text begins, and after a space."""

from __future__ import annotations

from collections.abc import Sequence

from server.api.state import ServerState
from server.http.errors import invalid
from server.text.tokenizer import Tokenizer

PARAM = "bad_words"
MAX_CHARS = 256  # of one word

Ids = tuple[tuple[int, ...], ...]


async def bad_word_ids(state: ServerState, words: Sequence[str] | None) -> Ids:
    """Raises RequestError 400 for words that cannot be barred."""
    if not words:
        return ()
    for word in words:
        if not word.strip():
            raise invalid(PARAM, "a word must not be empty")
        if len(word) > MAX_CHARS:
            raise invalid(PARAM, f"a word has at most {MAX_CHARS} characters, got {len(word)}")
    return await state.aside.run(2 * sum(map(len, words)), _encoded, state.tokenizer, words)


def _encoded(tokenizer: Tokenizer, words: Sequence[str]) -> Ids:
    """The form after a space counts where it begins with another token and is no longer: otherwise the space is a token
    of its own, and the word after it is barred already."""
    bare = [word.lstrip() for word in words]
    at_start = tokenizer.encode_plain(bare)
    after_space = tokenizer.encode_plain([" " + word for word in bare])
    found: list[tuple[int, ...]] = []
    for one, other in zip(at_start, after_space, strict=True):
        found.append(tuple(one))
        if len(other) == len(one) and other[0] != one[0]:
            found.append(tuple(other))
    return tuple(dict.fromkeys(found))
