"""Log-probabilities in the two shapes of the API, and vLLM's for prompts. All numbers are finite JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from server import wire
from server.generation import ScoredToken
from server.tokenizer import Tokenizer

FLOOR = -9999.0


def finite(value: float) -> float:
    return value if math.isfinite(value) and value > FLOOR else FLOOR


def chat_entries(tokenizer: Tokenizer, scored: Sequence[ScoredToken], num_top: int) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of chat."""
    entries = []
    for token in scored:
        top = zip(token.scores.top_ids[:num_top], token.scores.top_logprobs, strict=False)
        entry = _chat_entry(tokenizer, token.token_id, token.scores.logprob)
        entry["top_logprobs"] = [_chat_entry(tokenizer, id, logprob) for id, logprob in top]
        entries.append(entry)
    return entries


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = _bytes(tokenizer, token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


def completion_logprobs(
    tokenizer: Tokenizer, scored: Sequence[ScoredToken], num_top: int, *, base_offset: int = 0
) -> dict[str, list[Any]]:
    """`choices[].logprobs` of completions. The sampled token is always among `top_logprobs`."""
    top_logprobs = []
    for token in scored:
        top = {token.token_id: token.scores.logprob}
        top |= dict(zip(token.scores.top_ids[:num_top], token.scores.top_logprobs, strict=False))
        ranked = sorted(top.items(), key=lambda item: -item[1])
        top_logprobs.append({token_text(tokenizer, id): finite(logprob) for id, logprob in ranked})
    return {
        "text_offset": [base_offset + token.offset for token in scored],
        "token_logprobs": [finite(token.scores.logprob) for token in scored],
        "tokens": [token_text(tokenizer, token.token_id) for token in scored],
        "top_logprobs": top_logprobs,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[wire.Logprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token but the first, token id -> its score. An unknown rank is null."""
    entries: list[dict[str, Any] | None] = [None]
    for token_id, score in zip(prompt[1:], scores, strict=True):
        top = zip(score.top_ids[:num_top], score.top_logprobs, strict=False)
        ranked = {id: (logprob, rank) for rank, (id, logprob) in enumerate(top, start=1)}
        ranked.setdefault(token_id, (score.logprob, None))
        entries.append(
            {
                str(id): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, id)}
                for id, (logprob, rank) in ranked.items()
            }
        )
    return entries


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; where its bytes are not whole characters, OpenAI's `bytes:\\xe2\\x80` notation."""
    raw = _bytes(tokenizer, token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    return tokenizer.token_bytes[token_id] if token_id < len(tokenizer.token_bytes) else b""
