"""One response: the fields of its request, the output items as they grow, and its end."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from server.api.answers.logprobs import chat_entries
from server.api.routes.responses.items import INCOMPLETE, item_id
from server.api.routes.responses.translation import CUSTOM_INPUT, SeenTool
from server.engine.generation import CUT, Choice, ScoredToken
from server.http.encoding import LongList, NestedList, json_pieces, list_of
from server.http.request_error import RequestError
from server.text.tokenizer import ByteLevelTokenizer
from server.text.tool_calls.pieces import CallDelta, Content, Piece, Reasoning

QUEUED, IN_PROGRESS, COMPLETED = "queued", "in_progress", "completed"
CANCELLED, FAILED = "cancelled", "failed"
Logprobs = Callable[..., list[Any] | LongList]
LIMIT_REACHED = {"reason": "max_output_tokens"}


def logprobs(
    tokenizer: ByteLevelTokenizer, num_top: int, scored: Sequence[ScoredToken], *, in_event: bool = False
) -> list[Any] | LongList:
    """The field `logprobs` of a text. In an event the entries have no bytes of tokens."""
    entries = chat_entries(tokenizer, scored, num_top)
    return list_of(map(_without_bytes, entries) if in_event else entries, len(scored))


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    top = [{"token": each["token"], "logprob": each["logprob"]} for each in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}


class _GrowingItem:
    """An item of the output, with its text up to now."""

    ID_PREFIX: ClassVar[str]

    def __init__(self, index: int, response_id: str) -> None:
        self.index = index  # in the output
        self.id = item_id(self.ID_PREFIX, response_id, index)
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        self._texts.append(text)

    @property
    def text(self) -> str:
        return "".join(self._texts)


class TextItem(_GrowingItem):
    """A message of the model."""

    ID_PREFIX = "msg"

    def __init__(self, index: int, response_id: str, start: int, logprobs: Logprobs) -> None:
        super().__init__(index, response_id)
        self.start = self.end = start  # in the whole text of the answer, including calls
        self.logprobs = logprobs
        self.scored: list[ScoredToken] = []

    def add(self, text: str) -> None:
        super().add(text)
        self.end += len(text)

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs(self.scored)}

    def fields(self, status: str) -> dict[str, Any]:
        """The item's fields in the API."""
        content = [] if status == IN_PROGRESS else [self.part()]
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


class ReasoningItem(_GrowingItem):
    """The model's reasoning before its answer."""

    ID_PREFIX = "rs"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def fields(self, status: str) -> dict[str, Any]:
        """The item's fields in the API. There is no summary: the text is whole."""
        content = [] if status == IN_PROGRESS else [self.part()]
        return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}


class CallItem(_GrowingItem):
    """A call of a function. Its text is the arguments."""

    ID_PREFIX = "fc"

    def __init__(self, index: int, response_id: str, tool: SeenTool) -> None:
        super().__init__(index, response_id)
        self.call_id = f"call_{uuid.uuid4().hex}"
        self.name = tool.name
        self.namespace = tool.namespace

    def called(self) -> dict[str, Any]:
        """The fields that say which tool is called."""
        return {"name": self.name} | ({} if self.namespace is None else {"namespace": self.namespace})

    def fields(self, status: str) -> dict[str, Any]:
        """The item's fields in the API. Arguments are shown when they are complete."""
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": self.call_id,
            **self.called(),
            "arguments": "" if status == IN_PROGRESS else self.text,
            "status": status,
        }


class CustomCallItem(CallItem):
    """A call of a custom tool. Its text is the arguments, as those of a function with one parameter."""

    ID_PREFIX = "ctc"

    @property
    def input(self) -> str:
        """The text for the tool: the one parameter of the arguments, or all of the arguments if they have another
        form."""
        try:
            return str(msgspec.json.decode(self.text)[CUSTOM_INPUT])
        except (ValueError, KeyError, TypeError):
            return self.text

    def fields(self, status: str) -> dict[str, Any]:
        call = {"type": "custom_tool_call", "id": self.id, "call_id": self.call_id, **self.called()}
        return {**call, "input": "" if status == IN_PROGRESS else self.input, "status": status}


Item = TextItem | ReasoningItem | CallItem


@dataclass(frozen=True, slots=True)
class Added:
    """An addition to an item: its text, and the tokens of that text."""

    item: Item
    text: str
    scored: Sequence[ScoredToken]
    is_new: bool  # whether the item begins with it


class ResponseRecord:
    """One response. Only the event loop may change it.

    Args:
        fields: the fields of the response that repeat the request.
        logprobs: the function of this name, for the request's tokens.
        tools: the tools that the model may call, by the names that it sees.
        is_background: whether it is made without a connection. It begins as `queued`.
    """

    def __init__(
        self,
        id: str,
        fields: dict[str, Any],
        logprobs: Logprobs,
        tools: Mapping[str, SeenTool] = MappingProxyType({}),
        *,
        is_background: bool = False,
    ) -> None:
        self.id = id
        self.is_background = is_background
        self.status = QUEUED if is_background else IN_PROGRESS
        self.items: list[Item] = []
        self._fields = fields
        self._logprobs = logprobs
        self._tools = tools
        self._unclaimed: deque[ScoredToken] = deque()  # tokens whose text has not been added
        self._ends_in_half_call = False
        self._usage: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        self._created = int(time.time())

    @property
    def is_over(self) -> bool:
        """Whether the response has ended."""
        return self.status not in (QUEUED, IN_PROGRESS)

    def begin(self) -> None:
        """Notes that the engine has begun the answer."""
        if self.status == QUEUED:
            self.status = IN_PROGRESS

    def receive(self, scored: Iterable[ScoredToken]) -> None:
        """Receives tokens with their log-probabilities. Call it before the pieces with their text are added."""
        self._unclaimed.extend(scored)

    def add(self, piece: Piece) -> Added:
        """Adds a piece to the last item, or to a new one."""
        last, index = self.items[-1] if self.items else None, len(self.items)
        match piece:
            case CallDelta(name=str(name)):
                tool = self._tools[name]
                of_call = CustomCallItem if tool.function.type == "custom" else CallItem
                self.items.append(of_call(index, self.id, tool))
            case Reasoning() if not isinstance(last, ReasoningItem):
                self.items.append(ReasoningItem(index, self.id))
            case Content() if not isinstance(last, TextItem):
                self.items.append(TextItem(index, self.id, piece.start, self._logprobs))
        item, text = self.items[-1], piece.arguments if isinstance(piece, CallDelta) else piece.text
        item.add(text)
        return Added(item, text, self._claim(item) if isinstance(item, TextItem) else [], item is not last)

    def _claim(self, item: TextItem) -> list[ScoredToken]:
        """Gives the item the tokens of its text up to now. Tokens before it are those of calls, and are dropped."""
        own = []
        while self._unclaimed and self._unclaimed[0].offset < item.end:
            token = self._unclaimed.popleft()
            end = self._unclaimed[0].offset if self._unclaimed else item.end
            if max(token.offset + 1, end) > item.start:
                own.append(token)
        item.scored += own
        return own

    def add_rest(self) -> Added:
        """Adds the remaining tokens after the last piece, such as the end of the turn, to the last text. An empty
        answer also gets one item."""
        added = self.add(Content("", 0)) if not self.items else Added(self.items[-1], "", [], False)
        rest = [*self._unclaimed] if isinstance(added.item, TextItem) else []
        if isinstance(added.item, TextItem):
            added.item.scored += rest
        self._unclaimed.clear()
        return replace(added, scored=rest)

    def finish(self, choice: Choice) -> None:
        """Ends the response. The choice must have ended, and all its pieces must have been added."""
        self._usage = _usage(choice)
        self._ends_in_half_call = sum(isinstance(item, CallItem) for item in self.items) > choice.num_calls
        self.status = INCOMPLETE if choice.finish_reason in CUT else COMPLETED

    def fail(self, error: RequestError) -> None:
        self._unclaimed.clear()
        if not self.is_over:
            self.status = FAILED
            code = "rate_limit_exceeded" if error.status == 429 else "server_error"
            self._error = {"code": code, "message": error.message}

    def cancel(self) -> None:
        self._unclaimed.clear()
        if not self.is_over:
            self.status = CANCELLED

    def item_status(self, item: Item) -> str:
        """The status of an item that no longer grows."""
        uncut = (COMPLETED, INCOMPLETE) if isinstance(item, CallItem) else (COMPLETED,)
        is_cut = self._ends_in_half_call or (self.is_over and self.status not in uncut)
        return INCOMPLETE if is_cut and item is self.items[-1] else COMPLETED

    def body(self) -> dict[str, Any]:
        """The response's JSON object, for `json_pieces`."""
        items = self.items if self.is_over else []
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self.status,
            "error": self._error,
            "incomplete_details": LIMIT_REACHED if self.status == INCOMPLETE else None,
            **self._fields,
            "output": NestedList(item.fields(self.item_status(item)) for item in items),
            "usage": self._usage,
        }

    def encoded(self) -> bytes:
        """The response's JSON."""
        return b"".join(json_pieces(self.body()))


def _usage(choice: Choice) -> dict[str, Any]:
    return {
        "input_tokens": choice.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": choice.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": choice.num_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens},
        "total_tokens": choice.num_prompt_tokens + choice.num_tokens,
    }
