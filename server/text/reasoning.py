"""Separates the reasoning at the start of a text from the answer after it, while the text arrives.

    reader = ReasoningReader(REASONING_FORMATS["deepseek_r1"], prompt_end="...<think>\\n")
    reader.push("Two and two")                        # ""
    reader.take()                                     # [Reasoning("Two and two")]
    reader.push(" is four.\\n</think>\\n\\n4")         # "4"
    reader.take(), reader.answer_start                # [Reasoning(" is four.")], 30

The tags and the white space next to them belong to neither part. Text that may begin a tag is held back until it is
certain. The result does not depend on how the text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from server.text.tool_calls.pieces import Reasoning

MAX_HELD_CHARS = 64


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags with which a family of models marks its reasoning.

    With `is_open` the model reasons from its first token on, even if neither the prompt nor the text opens a tag.
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
# DeepHermes and Nemotron v1 reason if the system message has one of these. Their templates do not show it.
SWITCHES = ("</think>", "detailed thinking on")
_SHOWN = re.compile(r"think>|\b(enable_)?thinking\b")  # a tag, or a variable that switches reasoning on as in Hermes 4


def reasoning_format_in(template: str) -> str | None:
    """The name of the format that a chat template opens, asks for or removes. None: the template shows no reasoning."""
    return "qwen3" if _SHOWN.search(template) else None


def reasoning_format_asked(system_texts: Iterable[str]) -> ReasoningFormat | None:
    """The format of the reasoning that these system messages ask for; None: they do not ask for it."""
    is_asked = any(switch in text.lower() for text in system_texts for switch in SWITCHES)
    return REASONING_FORMATS["qwen3"] if is_asked else None


def is_open_after(format: ReasoningFormat, prompt_end: str) -> bool:
    """Whether an answer begins inside the reasoning, after a prompt that ends with `prompt_end`."""
    end = prompt_end.rstrip()
    return end.endswith(format.start) or (format.is_open and not end.endswith(format.end))


class ReasoningReader:
    """Separates one text into reasoning and answer.

    Args:
        format: the tags.
        prompt_end: the last characters of the prompt, at least as many as the tags and the white space after them have.
        is_shown: whether `take` returns the reasoning.
    """

    def __init__(self, format: ReasoningFormat, *, prompt_end: str = "", is_shown: bool = True) -> None:
        self._format = format
        self._is_shown = is_shown
        self._is_open = is_open_after(format, prompt_end)
        self.is_reasoning = self._is_open  # whether the text is inside its reasoning
        self._read: Callable[[str], str] = self._read_start
        self._held = ""  # white space, or the beginning of a tag
        self._reasoning: list[str] = []
        self._num_chars = 0  # the number of characters that have been read
        self.answer_start = 0  # the position of the answer in the text

    def push(self, text: str) -> str:
        """Reads text. Returns the new part of the answer."""
        self._num_chars += len(text)
        return self._read(text) if text else ""

    def take(self) -> list[Reasoning]:
        """The reasoning that has become certain since the last `take`."""
        text = "".join(self._reasoning)
        self._reasoning.clear()
        return [Reasoning(text)] if text and self._is_shown else []

    def finish(self) -> str:
        """Ends the text. Returns the rest of the answer."""
        if self.is_reasoning:
            self._reasoning.append(self._held.rstrip())
        elif self._read == self._read_start:
            return self._begin_answer(self._held)
        return ""

    def _read_start(self, text: str) -> str:
        """Reads white space and an opening tag."""
        self._held += text
        begun, start = self._held.lstrip(), self._format.start
        may_open = len(self._held) - len(begun) <= MAX_HELD_CHARS
        if may_open and len(begun) < len(start) and start.startswith(begun):
            return ""
        opened = may_open and begun.startswith(start)
        held, self._held = self._held, ""
        if opened or self._is_open:
            self.is_reasoning = True
            self._read = self._read_first
            return self._read_first(begun.removeprefix(start))
        return self._begin_answer(held)

    def _read_first(self, text: str) -> str:
        """Reads the white space before the reasoning."""
        text = text.lstrip()
        if not text:
            return ""
        self._read = self._read_reasoning
        return self._read_reasoning(text)

    def _read_reasoning(self, text: str) -> str:
        text, end = self._held + text, self._format.end
        at = text.find(end)
        if at >= 0:
            self._reasoning.append(text[:at].rstrip())
            self._held = ""
            self.is_reasoning = False
            self._read = self._read_gap
            return self._read_gap(text[at + len(end) :])
        kept = next(n for n in range(min(len(end) - 1, len(text)), -1, -1) if end.startswith(text[len(text) - n :]))
        certain = text[: len(text) - kept].rstrip()
        if len(text) - len(certain) > MAX_HELD_CHARS:
            certain = text[: len(text) - kept]
        self._reasoning.append(certain)
        self._held = text[len(certain) :]
        return ""

    def _read_gap(self, text: str) -> str:
        """Reads the white space before the answer."""
        text = text.lstrip()
        return self._begin_answer(text) if text else ""

    def _begin_answer(self, text: str) -> str:
        self.answer_start = self._num_chars - len(text)
        self._read = self._read_answer
        return text

    def _read_answer(self, text: str) -> str:
        return text
