"""Responses in memory, with limits on their number and on their bytes. Each belongs to the API key that made it."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict

from server.api.routes.responses.record import ResponseRecord

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20  # of texts and log-probabilities


class ResponseStore:
    """Keeps responses. If there are too many or they take too much memory, drops the oldest of the key that has most:
    no key can displace the responses of another one that has fewer."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._owners: dict[str, bytes] = {}
        self._records: defaultdict[bytes, OrderedDict[str, ResponseRecord]] = defaultdict(OrderedDict)  # by owner
        self._sizes: dict[str, int] = {}
        self._num_bytes: Counter[bytes] = Counter()  # by owner

    def put(self, record: ResponseRecord) -> list[ResponseRecord]:
        """Stores the record as the newest. Call it again when the record has grown. Returns those that are dropped."""
        self.remove(record.id)
        self._owners[record.id] = record.owner
        self._records[record.owner][record.id] = record
        self._sizes[record.id] = record.num_bytes
        self._num_bytes[record.owner] += record.num_bytes
        dropped = []
        while len(self._owners) > self._max_responses:
            dropped.append(self._drop_oldest(max(self._records, key=lambda owner: len(self._records[owner]))))
        while self._num_bytes.total() > self._max_bytes:
            dropped.append(self._drop_oldest(max(self._records, key=self._num_bytes.__getitem__)))
        return dropped

    def get(self, id: str, owner: bytes) -> ResponseRecord | None:
        """The response, if it belongs to `owner`."""
        return self._records[owner].get(id) if self._owners.get(id) == owner else None

    def __contains__(self, id: str) -> bool:
        """Whether the response is kept, whoever made it."""
        return id in self._owners

    def remove(self, id: str) -> bool:
        """Removes the response. Returns whether it was there."""
        owner = self._owners.pop(id, None)
        if owner is None:
            return False
        self._num_bytes[owner] -= self._sizes.pop(id)
        del self._records[owner][id]
        return True

    def _drop_oldest(self, owner: bytes) -> ResponseRecord:
        record = next(iter(self._records[owner].values()))
        self.remove(record.id)
        return record
