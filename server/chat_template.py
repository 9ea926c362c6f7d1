"""A conversation to ids, through the template that came with the tokenizer, without letting text become control.

A template is a program that glues its own control tokens and the users' text into one string, and whoever encodes
that string cannot tell the two apart. So the text is disguised before the template sees it: every character that
occurs in any special token is replaced by a stand-in from a private-use range that occurs nowhere in the
conversation. What matches a special token in the rendering was then written by the template alone, whatever it did
with the text (trimmed it, joined it, cut it). The stand-ins are undone afterwards, and the rest is encoded as plain
text.

A template that looks *into* the text (`if '</think>' in content`) renders differently when the text is disguised.
This is seen by comparing with the rendering of the plain conversation; then a lighter disguise is tried, a mark
before each character that could begin a special token. It is used only where it gives the plain rendering and the
very control tokens of the full disguise; otherwise the full disguise stands. No user's text becomes a control token
on any path.

Roles are not disguised: they are checked against a fixed list before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from server.template_environment import template_environment
from server.tokenizer import Tokenizer, special_token_pattern

STAND_INS = range(0x100000, 0x10FFFE)  # the last private-use plane
_STAND_IN = re.compile("[\U00100000-\U0010fffd]")


class TemplateError(ValueError):
    """The template refused the conversation, or could not be run; the message may be shown."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the rendering: plain text, or a special token that the template wrote."""

    text: str
    special: bool


class ChatTemplate:
    """A compiled template. Raises TemplateError where the source is not valid Jinja."""

    def __init__(self, source: str, *, special_tokens: Iterable[str], variables: Mapping[str, str]) -> None:
        try:
            self._template = template_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"The chat template is not valid: {error}") from error
        self._variables = dict(variables)
        special_tokens = list(special_tokens)
        self._pattern = special_token_pattern(special_tokens)
        self._letters = sorted({char for token in special_tokens for char in token if not char.isspace()})
        self._initials = {token[0] for token in special_tokens}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> list[Part]:
        """`extra` are further template variables; their text is as little trusted as the messages'.

        `continue_final_message` ends the rendering with the last message's text, for the model to go on with.
        Raises TemplateError.
        """
        extra = dict(extra or {})
        block = _free_block([*messages, extra], len(self._letters) + 2)
        mark, end = block[-2], block[-1]
        if continue_final_message:
            messages = [*messages[:-1], _with_end(messages[-1], end)]

        def rendering(disguise: dict[int, str]) -> str:
            disguised_messages = _translate_messages(messages, disguise)
            text = self._run(disguised_messages, add_generation_prompt, _translate(extra, disguise))
            return _cut_at(text, end) if continue_final_message else text

        plain = rendering({})
        full = dict(zip(map(ord, self._letters), block, strict=False))
        undo = {ord(stand_in): char for char, stand_in in zip(self._letters, block, strict=False)}
        disguised = _try(rendering, full)
        if disguised is not None and disguised.translate(undo) == plain:
            return _undisguise(self._parts(disguised), undo)
        marked = _try(rendering, {ord(char): mark + char for char in self._initials})
        if marked is not None and disguised is not None and marked.replace(mark, "") == plain:
            parts = _merge_marked(self._parts(marked), mark)
            if _specials(parts) == _specials(self._parts(disguised)):
                return parts
        if disguised is None:
            raise TemplateError("The chat template looks into the text in a way that could not be made safe.")
        return _undisguise(self._parts(disguised), undo)

    def _run(self, messages: list[dict[str, Any]], add_generation_prompt: bool, extra: dict[str, Any]) -> str:
        variables = extra | self._variables
        try:
            return self._template.render(
                **variables, messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None
            )
        except Exception as error:  # a template is a foreign program: whatever it raises, it refuses the conversation
            raise TemplateError(f"The chat template cannot render this conversation: {error}") from error

    def _parts(self, text: str) -> list[Part]:
        pieces = self._pattern.split(text)
        return [Part(piece, i % 2 == 1) for i, piece in enumerate(pieces) if piece]


def encode_parts(tokenizer: Tokenizer, parts: Sequence[Part]) -> list[int]:
    """Special parts become their ids, plain ones are encoded as text whatever they look like."""
    texts = [part.text for part in parts if not part.special]
    plain = iter(tokenizer.encode_plain(texts))
    ids: list[int] = []
    for part in parts:
        if part.special:
            ids.append(tokenizer.special_tokens[part.text])
        else:
            ids += next(plain)
    return ids


def split_special(tokenizer: Tokenizer, text: str) -> list[Part]:
    """For raw prompts, whose author writes the control tokens himself: every special token is taken for one."""
    pieces = special_token_pattern(tokenizer.special_tokens).split(text)
    return [Part(piece, i % 2 == 1) for i, piece in enumerate(pieces) if piece]


def _try(rendering: Callable[[dict[int, str]], str], disguise: dict[int, str]) -> str | None:
    try:
        return rendering(disguise)
    except TemplateError:
        return None


def _free_block(values: Sequence[Any], size: int) -> list[str]:
    """`size` neighbouring stand-ins that occur in none of the values' strings."""
    used = {ord(char) for text in _strings(values) for char in _STAND_IN.findall(text)}
    for start in range(STAND_INS.start, STAND_INS.stop - size, size):
        if used.isdisjoint(range(start, start + size)):
            return [chr(code) for code in range(start, start + size)]
    raise TemplateError("The conversation uses up the last private-use plane of Unicode.")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _translate(value: Any, table: dict[int, str]) -> Any:
    """The value with every string in it translated, keys of inner mappings too."""
    if isinstance(value, str):
        return value.translate(table) if table else value
    if isinstance(value, Mapping):
        return {key: _translate_inner(item, table) for key, item in value.items()}
    return _translate_inner(value, table)


def _translate_inner(value: Any, table: dict[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(table) if table else value
    if isinstance(value, Mapping):
        return {_translate_inner(key, table): _translate_inner(item, table) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_translate_inner(item, table) for item in value]
    return value


def _translate_messages(messages: Sequence[Mapping[str, Any]], table: dict[int, str]) -> list[dict[str, Any]]:
    return [_translate(message, table) | {"role": message["role"]} for message in messages]


def _with_end(message: Mapping[str, Any], end: str) -> dict[str, Any]:
    if not isinstance(message.get("content"), str):
        raise TemplateError("There is no text to continue in the last message.")
    return {**message, "content": f"{message['content']}{end} "}


def _cut_at(text: str, end: str) -> str:
    """Up to the end mark. A template that trims took the space after it, and would have trimmed the text's own end."""
    at = text.rfind(end)
    if at < 0:
        raise TemplateError("The chat template leaves out the message that is to be continued.")
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()


def _undisguise(parts: list[Part], undo: dict[int, str]) -> list[Part]:
    return [part if part.special else Part(part.text.translate(undo), False) for part in parts]


def _merge_marked(parts: list[Part], mark: str) -> list[Part]:
    """Takes what merely looks like a special token, because a mark stands before it, back into the text."""
    merged: list[Part] = []
    for part in parts:
        text = merged[-1].text if merged and not merged[-1].special else None
        if text is not None and (not part.special or text.endswith(mark)):
            merged[-1] = Part(text + part.text, False)
        else:
            merged.append(part)
    plain = [part if part.special else Part(part.text.replace(mark, ""), False) for part in merged]
    return [part for part in plain if part.text]


def _specials(parts: list[Part]) -> list[str]:
    return [part.text for part in parts if part.special]
