"""Responses in memory: so many, with so much text, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict

from server.api.responses.record import ResponseRecord

MAX_RESPONSES = 1024
MAX_CHARS = 64 * 2**20


class ResponseStore:
    """Keeps responses, and drops the oldest where there are too many or they are too long together."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_chars: int = MAX_CHARS) -> None:
        self._max_responses = max_responses
        self._max_chars = max_chars
        self._records: OrderedDict[str, ResponseRecord] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._num_chars = 0

    def put(self, record: ResponseRecord) -> None:
        """Keeps it as the newest. To be called again when it has grown."""
        self.remove(record.id)
        self._records[record.id] = record
        self._sizes[record.id] = record.num_chars
        self._num_chars += record.num_chars
        while self._records and (len(self._records) > self._max_responses or self._num_chars > self._max_chars):
            self.remove(next(iter(self._records)))

    def get(self, id: str) -> ResponseRecord | None:
        return self._records.get(id)

    def remove(self, id: str) -> bool:
        """Whether there was such a response."""
        self._num_chars -= self._sizes.pop(id, 0)
        return self._records.pop(id, None) is not None
