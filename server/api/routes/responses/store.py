"""Responses in memory, with limits on their number and on their text."""

from __future__ import annotations

from collections import OrderedDict

from server.api.routes.responses.record import ResponseRecord

MAX_RESPONSES = 1024
MAX_CHARS = 64 * 2**20


class ResponseStore:
    """Keeps responses. Drops the oldest if there are too many or their total text is too long."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_chars: int = MAX_CHARS) -> None:
        self._max_responses = max_responses
        self._max_chars = max_chars
        self._records: OrderedDict[str, ResponseRecord] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._num_chars = 0

    def put(self, record: ResponseRecord) -> None:
        """Stores the record as the newest. Call it again when the record has grown."""
        self.remove(record.id)
        self._records[record.id] = record
        self._sizes[record.id] = record.num_chars
        self._num_chars += record.num_chars
        while self._records and (len(self._records) > self._max_responses or self._num_chars > self._max_chars):
            self.remove(next(iter(self._records)))

    def get(self, id: str) -> ResponseRecord | None:
        return self._records.get(id)

    def remove(self, id: str) -> bool:
        """Removes the response. Returns whether it was there."""
        self._num_chars -= self._sizes.pop(id, 0)
        return self._records.pop(id, None) is not None
