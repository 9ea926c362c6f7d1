"""One batch: its input, the records of its answers, and its end."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from itertools import batched
from typing import Any, BinaryIO, NamedTuple

from server.api.request.body import count_marks
from server.batches.batch_file import (
    INVALID_LINE,
    RESPONSES,
    Line,
    answer_record,
    numbered_lines,
    parse_line,
    problem_record,
)
from server.batches.store import BATCH, BatchStore, Fields
from server.http.body import BodyLimits
from server.settings import FLEX

PRIORITY = 1_000_000  # after all requests without a higher number
MAX_LINES = 50_000
MAX_PROBLEMS = 100  # the most lines that a failed batch names
LINES_AT_ONCE = 32  # lines that are checked before other threads have a turn
PAUSE_S = 0.001
SAVE_INTERVAL_S = 1.0  # between two writes of a batch's counts

VALIDATING, IN_PROGRESS, FINALIZING = "validating", "in_progress", "finalizing"
COMPLETED, FAILED, CANCELLED, EXPIRED = "completed", "failed", "cancelled", "expired"
_UNSET = (  # the fields that a new batch has without a value
    "errors output_file_id error_file_id in_progress_at finalizing_at completed_at failed_at expired_at cancelling_at "
    "cancelled_at"
).split()
_UNANSWERED = {
    CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was answered."),
    EXPIRED: ("batch_expired", "The completion window ended before this request was answered."),
}


class BatchRequest(NamedTuple):
    """A line that is to be answered."""

    number: int
    line: Line  # without its body
    body: bytes


class BatchWork:
    """A batch that is not over. Its methods wait for the disk and are called in threads.

    The store has all answers, so the work can stop at any time and be continued.

    Args:
        limits: the limits of the body of a request.
    """

    def __init__(self, store: BatchStore, owner: bytes, id: str, limits: BodyLimits) -> None:
        self._store = store
        self._owner = owner
        self._limits = limits
        self._lock = threading.Lock()  # a call may outlive the task that awaits it
        self._batch: Fields = store.find(owner, BATCH, id) or {}
        self._answered = store.answered(id)
        self._saved_s = 0.0
        self._is_closed = self._is_closing = False
        self._input: BinaryIO | None = None
        with contextlib.suppress(FileNotFoundError):  # `begin` says so
            self._input = store.content(self._batch["input_file_id"]).open("rb")
        self._remaining = self._unanswered()

    def begin(self) -> bool:
        """Checks the lines. Returns whether the batch goes on. Otherwise it is over, or `close` was called."""
        with self._lock:
            problems, total = self._check() if self._batch["request_counts"]["total"] == 0 else ([], None)
            if self._is_closing:
                return False
            if self._input is None:
                id = self._batch["input_file_id"]
                problems = [_problem("input_file_not_found", f"The input file {id} has been deleted.")]
            if problems:
                self._end(FAILED, problems)
                return False
            if total is not None:
                self._batch["request_counts"]["total"] = total
            self._batch |= {"status": IN_PROGRESS, "in_progress_at": self._batch["in_progress_at"] or _now()}
            self._save()
            return True

    def next(self) -> BatchRequest | None:
        """The next line without an answer; None: there are no more. Each line is returned once."""
        with self._lock:
            return next(self._remaining, None)

    def add(self, asked: BatchRequest, status: int, answer: bytes) -> None:
        """Keeps the answer to a line, as JSON. Raises FullError."""
        with self._lock:
            if self._is_closed:
                return
            records = {asked.number: answer_record(asked.line, status, answer)}
            self._add(records, is_error=status != 200)
            if time.monotonic() > self._saved_s + SAVE_INTERVAL_S:
                self._save()

    def early_end(self) -> str | None:
        """The status with which the batch must end now; None: it goes on."""
        if self._store.is_cancelled(self._owner, self._batch["id"]):
            return CANCELLED
        return EXPIRED if time.time() > self._batch["expires_at"] else None

    def end(self, status: str, problem: str | None = None) -> None:
        """Writes the answers to files. `problem` is the reason why the batch ends early."""
        with self._lock:
            self._end(status, [] if problem is None else [_problem("storage_full", problem)])

    def close(self) -> None:
        """Leaves the rest of the batch for later."""
        self._is_closing = True
        with self._lock:
            self._close()

    def _check(self) -> tuple[list[Fields], int]:
        """The problems of the lines, and how many lines there are."""
        problems: list[Fields] = []
        seen: set[str] = set()
        total = 0
        for number, line in self._lines():
            total += 1
            if total > MAX_LINES:
                problems = [_problem("too_many_requests", f"A batch has at most {MAX_LINES} requests.")]
                break
            problem = line.problem
            if problem is None and line.url != self._batch["endpoint"]:
                problem = f"line {number}: url is {line.url}, and the batch is for {self._batch['endpoint']}"
            if problem is None and line.custom_id in seen:
                problem = f"line {number}: custom_id {line.custom_id!r} is taken by a line before"
            if problem is not None:
                problems.append(_problem(INVALID_LINE, problem, number))
            if len(problems) == MAX_PROBLEMS:
                break
            seen.add(line.custom_id or "")
        return problems if total else [_problem("empty_file", "The input file has no lines.")], total

    def _lines(self) -> Iterator[tuple[int, Line]]:
        if self._input is None:
            return
        self._input.seek(0)
        for number, text in numbered_lines(self._input):
            if self._is_closing:
                return
            if number % LINES_AT_ONCE == 0:
                time.sleep(PAUSE_S)  # the event loop gets the interpreter's lock
            yield number, self._parse(number, text)

    def _parse(self, number: int, text: str) -> Line:
        limits = self._limits
        raw = text.encode(errors="surrogateescape")
        if len(raw) > limits.max_bytes:
            return Line(custom_id=None, problem=f"line {number} has more than {limits.max_bytes} bytes")
        if count_marks(raw, limits.max_marks) > limits.max_marks:
            problem = f"line {number} has more than {limits.max_marks} brackets and colons outside of texts"
            return Line(custom_id=None, problem=problem)
        return parse_line(text, number, {})

    def _add(self, records: dict[int, bytes], *, is_error: bool, may_fill: bool = False) -> None:
        self._store.add_records(self._batch["id"], records, is_error=is_error, may_fill=may_fill)
        self._answered |= dict.fromkeys(records, is_error)

    def _unanswered(self) -> Iterator[BatchRequest]:
        for number, line in self._lines():
            if number in self._answered or line.body is None:
                continue
            body: dict[str, Any] = {"store": False} if line.url == RESPONSES else {}
            # The batch has a deadline, and its lines have no targets of their own.
            body |= line.body | dict.fromkeys(line.body.keys() & {"slo"})
            body |= {"priority": PRIORITY, "timeout_s": None, "service_tier": FLEX}
            raw = json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")
            yield BatchRequest(number, Line(custom_id=line.custom_id, url=line.url), raw)

    def _end(self, status: str, problems: list[Fields]) -> None:
        if status in _UNANSWERED:
            unanswered = ((number, line) for number, line in self._lines() if number not in self._answered)
            for some in batched(unanswered, LINES_AT_ONCE):
                records = {number: problem_record(line, *_UNANSWERED[status]) for number, line in some}
                self._add(records, is_error=True, may_fill=True)
        batch = self._batch
        if problems:
            batch["errors"] = {"object": "list", "data": problems}
        if self._answered:
            batch["finalizing_at"] = _now()
            self._save(FINALIZING)
        batch[f"{status}_at"] = _now()
        self._count(status)
        self._store.end(self._owner, batch)
        self._close()

    def _save(self, status: str | None = None) -> None:
        self._count(status)
        self._store.save(self._owner, self._batch)
        self._saved_s = time.monotonic()

    def _count(self, status: str | None) -> None:
        counts = self._batch["request_counts"]
        counts["failed"] = sum(self._answered.values())
        counts["completed"] = len(self._answered) - counts["failed"]
        if status is not None:
            self._batch["status"] = status

    def _close(self) -> None:
        self._is_closed = True
        if self._input is not None:
            self._input.close()


def new_batch(id: str, input_file_id: str, endpoint: str, window: str, seconds: int, metadata: Any) -> Fields:
    """The fields of a new batch, whose lines are not checked yet."""
    created = _now()
    return dict.fromkeys(_UNSET) | {
        "id": id,
        "object": "batch",
        "endpoint": endpoint,
        "input_file_id": input_file_id,
        "completion_window": window,
        "status": VALIDATING,
        "created_at": created,
        "expires_at": created + seconds,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
    }


def _problem(code: str, message: str, line: int | None = None) -> Fields:
    return {"code": code, "message": message, "line": line, "param": None}


def _now() -> int:
    return int(time.time())
