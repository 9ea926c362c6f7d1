"""Separates the reasoning at the start of a text from the answer after it, while the text arrives.

    reader = ReasoningReader(REASONING_FORMATS["deepseek_r1"], prompt_end="...<think>\\n")
    reader.push("Two and two")
    reader.take()                       # [Reasoning("Two and two")]
    reader.push(" is four.\\n</think>\\n\\n4")
    reader.take()                       # [Reasoning(" is four."), Content("4", 30)]

The tags and the white space next to them belong to neither. Text that may be the beginning of a tag is held back until
it is certain. The pieces do not depend on how the text is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.text.tool_calls.parser import CallParser
from server.text.tool_calls.pieces import Content, Piece, Reasoning

MAX_HELD_CHARS = 64


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    `is_open`: the model reasons from its first token on, even if neither the prompt nor the text opens a tag.
    """

    start: str = "<think>"
    end: str = "</think>"
    is_open: bool = False


# By vLLM's names. What the prompt ends with counts first: a template may open the tag, or close an empty one.
REASONING_FORMATS: dict[str, ReasoningFormat | None] = {
    "none": None,
    "deepseek_r1": ReasoningFormat(is_open=True),
    "qwen3": ReasoningFormat(),
}


def reasoning_format_in(template: str) -> str | None:
    """The name of the format that a chat template shows: one that opens or removes reasoning. None: it shows none."""
    return "qwen3" if "</think>" in template else None


def is_open_after(format: ReasoningFormat, prompt_end: str) -> bool:
    """Whether an answer begins inside the reasoning, after a prompt that ends with `prompt_end`."""
    end = prompt_end.rstrip()
    return end.endswith(format.start) or (format.is_open and not end.endswith(format.end))


class ReasoningReader:
    """Reads one text.

    Args:
        format: the tags.
        prompt_end: the last characters of the prompt, at least as many as the tags and the white space after them have.
        calls: reads the answer; None: the answer is content.
        is_shown: whether the reasoning is among the pieces.
    """

    def __init__(
        self, format: ReasoningFormat, *, prompt_end: str = "", calls: CallParser | None = None, is_shown: bool = True
    ) -> None:
        self._format = format
        self._calls = calls
        self._is_shown = is_shown
        self._is_open = is_open_after(format, prompt_end)
        self.is_reasoning = self._is_open  # whether the text is inside its reasoning
        self._read = self._read_start
        self._held = ""  # white space, or the beginning of a tag
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._num_chars = 0  # read
        self._answer_start = 0  # the place of the answer in the text
        self._num_taken = 0  # characters of the answer

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def is_full(self) -> bool:
        return self._calls is not None and self._calls.is_full

    def push(self, text: str) -> None:
        self._num_chars += len(text)
        if text:
            self._read(text)

    def take(self) -> list[Piece]:
        """The pieces that have become certain since the last `take`."""
        text, answer = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        pieces: list[Piece] = [Reasoning(text)] if text and self._is_shown else []
        if answer:
            pieces.append(Content(answer, self._answer_start + self._num_taken))
            self._num_taken += len(answer)
        for piece in () if self._calls is None else self._calls.take():
            if isinstance(piece, Content):
                pieces.append(Content(piece.text, self._answer_start + piece.start))
            else:
                pieces.append(piece)
        return pieces

    def finish(self, *, cut: bool = False) -> None:
        """Ends the text. `cut`: by a limit or a stop string, not by the model."""
        if self.is_reasoning:
            self._reasoning.append(self._held.rstrip())
        elif self._read == self._read_start:
            self._begin_answer(self._held)
        if self._calls is not None:
            self._calls.finish(cut=cut)

    def _read_start(self, text: str) -> None:
        """Reads white space and an opening tag."""
        self._held += text
        begun, start = self._held.lstrip(), self._format.start
        may_open = len(self._held) - len(begun) <= MAX_HELD_CHARS
        if may_open and len(begun) < len(start) and start.startswith(begun):
            return
        opened = may_open and begun.startswith(start)
        held, self._held = self._held, ""
        if opened or self._is_open:
            self.is_reasoning = True
            self._read = self._read_first
            self._read_first(begun.removeprefix(start))
        else:
            self._begin_answer(held)

    def _read_first(self, text: str) -> None:
        """Reads the white space before the reasoning."""
        text = text.lstrip()
        if text:
            self._read = self._read_reasoning
            self._read_reasoning(text)

    def _read_reasoning(self, text: str) -> None:
        text, end = self._held + text, self._format.end
        at = text.find(end)
        if at >= 0:
            self._reasoning.append(text[:at].rstrip())
            self._held = ""
            self.is_reasoning = False
            self._read = self._read_gap
            if rest := text[at + len(end) :]:
                self._read_gap(rest)
            return
        kept = next(n for n in range(min(len(end) - 1, len(text)), -1, -1) if end.startswith(text[len(text) - n :]))
        certain = text[: len(text) - kept].rstrip()
        if len(text) - len(certain) > MAX_HELD_CHARS:
            certain = text[: len(text) - kept]
        self._reasoning.append(certain)
        self._held = text[len(certain) :]

    def _read_gap(self, text: str) -> None:
        """Reads the white space before the answer."""
        text = text.lstrip()
        if text:
            self._begin_answer(text)

    def _begin_answer(self, text: str) -> None:
        self._answer_start = self._num_chars - len(text)
        self._read = self._read_answer
        self._read_answer(text)

    def _read_answer(self, text: str) -> None:
        if self._calls is None:
            self._content.append(text)
        else:
            self._calls.push(text)
