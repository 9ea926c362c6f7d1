"""Responses in memory, with limits on their number and on their bytes. Each belongs to the API key that made it."""

from __future__ import annotations

from collections import OrderedDict

from server.api.routes.responses.record import ResponseRecord

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20  # of texts and log-probabilities


class ResponseStore:
    """Keeps responses. Drops the oldest if there are too many or they take too much memory."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._records: OrderedDict[str, ResponseRecord] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0

    def put(self, record: ResponseRecord) -> None:
        """Stores the record as the newest. Call it again when the record has grown."""
        self.remove(record.id)
        self._records[record.id] = record
        self._sizes[record.id] = record.num_bytes
        self._num_bytes += record.num_bytes
        while self._records and (len(self._records) > self._max_responses or self._num_bytes > self._max_bytes):
            self.remove(next(iter(self._records)))

    def get(self, id: str, owner: bytes) -> ResponseRecord | None:
        """The response, if it belongs to `owner`."""
        record = self._records.get(id)
        return record if record is not None and record.owner == owner else None

    def __contains__(self, id: str) -> bool:
        """Whether the response is kept, whoever made it."""
        return id in self._records

    def remove(self, id: str) -> bool:
        """Removes the response. Returns whether it was there."""
        self._num_bytes -= self._sizes.pop(id, 0)
        return self._records.pop(id, None) is not None
