"""The record of a request, of which the log, the metrics and the traces tell when it has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from batcher.request import FinishReason, SamplingParams
from server.engine.embedding import Embeddings
from server.engine.generation import Generation

logger = logging.getLogger("pallas_serve.requests")

MAX_HEADER_CHARS = 1000
# Headers of answers: keywords of schemas that the grammar does not enforce, fields without effect, the tokens that were
# cut from each prompt, and the limit of output in place of a larger one.
NOTES = UNENFORCED, IGNORED, TRUNCATED, LOWERED = (
    "x-unenforced-keywords", "x-ignored-fields", "x-truncated-prompt-tokens", "x-lowered-max-tokens",
)  # fmt: skip


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request. The fields from `work` on are set when the engine gets it."""

    id: str  # the answer's x-request-id
    key: str | None = None  # the name of its API key; None: the server has no keys
    started_ns: int = field(default_factory=time.time_ns)
    started_s: float = field(default_factory=time.monotonic)
    notes: dict[str, list[str]] = field(default_factory=dict)  # headers of the answer for its client's developer
    work: Generation | Embeddings | None = None
    answer_id: str = ""
    model: str = ""
    sampling: SamplingParams | None = None
    num_prompt_tokens: int = 0
    num_choices: int = 1  # of each prompt

    def headers(self) -> Iterable[tuple[bytes, bytes]]:
        """The headers of the answer's notes. They may contain names that the client has chosen."""
        for name, values in self.notes.items():
            text = quote(", ".join(dict.fromkeys(values)), safe=" ,:()#/$~.[]_-")
            yield name.encode(), text[:MAX_HEADER_CHARS].encode()

    def usage(self) -> dict[str, Any]:
        """The model, the tokens and the times of the work so far, for the log."""
        work = self.work
        if work is None:
            return {}
        found = {"id": self.answer_id, "model": self.model, "prompt_tokens": self.num_prompt_tokens}
        if isinstance(work, Embeddings):
            return found | {"cached_tokens": work.num_cached_tokens, "completion_tokens": 0}
        choices = work.choices
        firsts = [choice.first_token_s for choice in choices if choice.first_token_s is not None]
        found |= {"ttft_s": round(min(firsts) - self.started_s, 6)} if firsts else {}
        unended = (FinishReason.ERROR if work.error is not None else FinishReason.ABORT).value
        return found | {
            "cached_tokens": sum(choice.num_cached_tokens for choice in choices[:: self.num_choices]),
            "completion_tokens": sum(choice.num_tokens for choice in choices),
            "finish_reason": ",".join(sorted({choice.finish_reason or unended for choice in choices})),
        }


current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)


def begun(work: Generation | Embeddings, **fields: Any) -> None:
    """Sets these fields of the current request's record, because the engine gets its work."""
    if (record := current_record.get()) is not None:
        for name, value in {"work": work, **fields}.items():
            setattr(record, name, value)


def note(header: str, *values: str | int) -> None:
    """Adds to one of NOTES in the answer to the current request."""
    if values and (record := current_record.get()) is not None:
        record.notes.setdefault(header, []).extend(map(str, values))


def log_request(record: RequestRecord, **fields: Any) -> None:
    """Logs a request that has ended, with these fields."""
    head = {"request_id": record.id, "key": record.key, **fields, **record.usage()}
    duration_s = round(time.monotonic() - record.started_s, 6)
    logger.info("request", extra={"fields": head | {"duration_s": duration_s}})
