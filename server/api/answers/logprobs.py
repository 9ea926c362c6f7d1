"""Log-probabilities in the two shapes of the API, and in vLLM's shape for prompts. All numbers are finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from server.engine import wire
from server.engine.generation import ScoredToken
from server.http.encoding import LongList, list_of
from server.text.tokenizer import ByteLevelTokenizer

FLOOR = -9999.0


def finite(value: float) -> float:
    """A log-probability that JSON can hold: at least FLOOR."""
    return value if math.isfinite(value) and value > FLOOR else FLOOR


def chat_entries(
    tokenizer: ByteLevelTokenizer, scored: Iterable[ScoredToken], num_top: int, *, as_ids: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields the entries of chat's `choices[].logprobs.content`. `as_ids` names tokens by their ids."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = _bytes(tokenizer, token_id)
        name = _id_name(token_id) if as_ids else raw.decode("utf-8", "replace")
        return {"token": name, "logprob": finite(logprob), "bytes": list(raw)}

    for token in scored:
        assert token.scores is not None  # chat scores generated tokens only
        top = [entry(id, logprob) for id, logprob in token.scores.top(num_top)]
        yield entry(token.token_id, token.scores.logprob) | {"top_logprobs": top}


def completion_logprobs(
    tokenizer: ByteLevelTokenizer,
    tokens: Callable[[], Iterable[ScoredToken]],
    count: int,
    num_top: int,
    *,
    as_ids: bool = False,
) -> dict[str, list[Any] | LongList]:
    """The `choices[].logprobs` of completions: four lists of `count` entries. `tokens` is called once per list.

    `top_logprobs` begin with the token itself, as in vLLM. `as_ids` names tokens by their ids.
    """

    def name(token_id: int) -> str:
        return _id_name(token_id) if as_ids else token_text(tokenizer, token_id)

    def entries(entry: Callable[[ScoredToken], Any]) -> list[Any] | LongList:
        return list_of(map(entry, tokens()), count)

    def top(token: ScoredToken) -> dict[str, float] | None:
        if token.scores is None:
            return None
        values = {token.token_id: token.scores.logprob} | dict(token.scores.top(num_top))
        return {name(id): finite(logprob) for id, logprob in values.items()}

    return {
        "text_offset": entries(lambda token: token.offset),
        "token_logprobs": entries(lambda token: None if token.scores is None else finite(token.scores.logprob)),
        "tokens": entries(lambda token: name(token.token_id)),
        "top_logprobs": entries(top),
    }


def prompt_logprobs(
    tokenizer: ByteLevelTokenizer, prompt: Sequence[int], scores: Sequence[wire.Logprobs] | None, num_top: int | None
) -> dict[str, Any]:
    """The field `prompt_logprobs` of vLLM: for each token, token id -> its score; null for the first. Without `num_top`
    the field is null."""

    def entries(num_top: int) -> Iterator[dict[str, Any] | None]:
        yield None
        for token_id, score in zip(islice(prompt, 1, None), scores or (), strict=True):
            yield scores_by_id(tokenizer, token_id, score, num_top)

    return {"prompt_logprobs": None if num_top is None else list_of(entries(num_top), len(prompt))}


def scores_by_id(
    tokenizer: ByteLevelTokenizer, token_id: int, score: wire.Logprobs, num_top: int, *, ranked: bool = True
) -> dict[str, Any]:
    """Token id -> its score, of the token itself and of the others, as in vLLM. `ranked` is that of `by_id`."""
    return {
        str(id): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, id)}
        for id, logprob, rank in by_id(token_id, score, num_top, ranked=ranked)
    }


def by_id(
    token_id: int, score: wire.Logprobs, num_top: int, *, ranked: bool
) -> Iterator[tuple[int, float, int | None]]:
    """Yields (token id, log-probability, rank), each token once: the token itself, and then the others. These are the
    most likely ones if they are `ranked`. Those of `logprob_token_ids` have no known rank."""
    yield token_id, score.logprob, score.rank
    for place, (id, logprob) in enumerate(score.top(num_top), start=1):
        if id != token_id:
            yield id, logprob, place if ranked else None


def token_text(tokenizer: ByteLevelTokenizer, token_id: int) -> str:
    """The token's text, or OpenAI's `bytes:\\xe2\\x80` notation if its bytes are not whole characters."""
    raw = _bytes(tokenizer, token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _bytes(tokenizer: ByteLevelTokenizer, token_id: int) -> bytes:
    return tokenizer.token_bytes[token_id] if token_id < len(tokenizer.token_bytes) else b""
