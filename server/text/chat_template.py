"""A conversation to ids, through the template that came with the tokenizer, without letting text become control.

A template is a program that glues its own control tokens and the users' text into one string, and whoever encodes
that string cannot tell the two apart. So the template runs twice: once on the conversation itself, once with every
character of the text that occurs in any special token masked by one that occurs in none. What matches a special token
in the masked rendering was then written by the template alone, whatever it did with the text (trimmed it, joined it,
cut it). Masking keeps lengths, so its places are the places of the control tokens in the plain rendering; all the
rest is encoded as plain text.

A template that looks *into* the text (`if '</think>' in content`) renders differently when the text is masked. The
two renderings show it. Then a lighter mask is tried: a mark before each character that could begin a special token. It
is used only where it gives the plain rendering and the control tokens of the masked one. Where that fails too, the text
is rendered under a mask that can be taken off afterwards. No user's text becomes a control token on any path.

Roles are not masked: they are checked against a fixed list before. Nor are the names of fields by which templates look
into messages, tools and documents (FIELDS); every other key is text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2.nodes

from model.inputs.limits import MAX_TEMPLATE_BYTES
from server.text.masking import Change, Mask, Substitution, free_characters, map_strings, translated
from server.text.special_tokens import Part, SpecialTokens
from server.text.template_environment import template_environment

FIELDS = frozenset(
    "role content name tool_calls tool_call_id id type function description parameters arguments strict return "
    "properties required items enum default anyOf additionalProperties title text doc_id".split()
)
_TWO_CALLS = [{"type": "function", "id": id, "function": {"name": "f", "arguments": {}}} for id in ("call_1", "call_2")]


class TemplateError(ValueError):
    """The template refused the conversation, or could not be run; the message may be shown."""


class ChatTemplate:
    """A compiled template. Raises TemplateError where the source is not valid Jinja."""

    def __init__(self, source: str, *, special_tokens: Iterable[str], variables: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_BYTES:
            raise TemplateError(
                f"The chat template has {len(source)} characters; at most {MAX_TEMPLATE_BYTES} are read."
            )
        environment = template_environment()
        try:
            self._template = environment.from_string(source)
            names = environment.parse(source).find_all(jinja2.nodes.Name)
            self._reads = frozenset(name.name for name in names if name.ctx == "load")
        except Exception as error:  # Jinja's own errors, and Python's where it cannot compile what Jinja wrote
            raise TemplateError(f"The chat template is not valid: {error or type(error).__name__}") from error
        self._variables = dict(variables)
        special_tokens = list(special_tokens)
        self._parts = SpecialTokens(special_tokens).split
        self._letters = sorted({char for token in special_tokens for char in token if not char.isspace()})
        self._initials = {token[0] for token in special_tokens}
        self._mask = Mask(self._letters)

    def reads(self, variable: str) -> bool:
        """Whether the template makes use of a variable, such as `tools` or `documents`."""
        return variable in self._reads

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> list[Part]:
        """`extra` are further template variables, `tools` and `documents` among them; their text is as little trusted
        as the messages'.

        `continue_final_message` ends the rendering with the last message's text, for the model to go on with.
        Raises TemplateError.
        """
        extra = dict(extra or {})
        if any(len(message.get("tool_calls", ())) > 1 for message in messages) and not self._takes_two_calls():
            messages = _with_single_calls(messages)
        end = ""
        if continue_final_message:
            (end,) = self._free_characters([messages, extra], 1)
            messages = [*messages[:-1], _with_end(messages[-1], end)]

        def rendering(change: Change) -> str:
            text = self._run(messages, add_generation_prompt, extra, change)
            return _cut_at(text, end) if end else text

        plain = rendering(lambda text: text)
        masked = _try(rendering, self._mask)
        if masked is not None:
            parts = self._cut_like(plain, masked)
            if parts is not None:
                return parts
        mark, *stand_ins = self._free_characters([messages, extra], 1 + len(self._letters))
        marked = _try(rendering, lambda text: translated(text, {ord(char): mark + char for char in self._initials}))
        if masked is not None and marked is not None and marked.replace(mark, "") == plain:
            parts = _merge_marked(self._parts(marked), mark)
            if _specials(parts) == _specials(self._parts(masked)):
                return parts
        substitution = Substitution(self._letters, stand_ins)
        parts = self._parts(rendering(substitution))
        return [part if part.special else Part(substitution.undo(part.text), False) for part in parts]

    def _cut_like(self, plain: str, masked: str) -> list[Part] | None:
        """`plain` cut where the control tokens of `masked` are; None where the two are not the same text."""
        if self._mask(plain) != self._mask(masked):
            return None
        parts, at = [], 0
        for part in self._parts(masked):
            text = plain[at : at + len(part.text)]
            if part.special and text != part.text:
                return None
            parts.append(Part(text, part.special))
            at += len(text)
        return parts

    def _free_characters(self, value: Any, count: int) -> list[str]:
        try:
            return free_characters(value, count)
        except ValueError as error:
            raise TemplateError(str(error)) from error

    def _run(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
        change: Change,
    ) -> str:
        """The rendering of the conversation with every string of it changed, but for roles and names of fields."""
        changed = [_change_fields(message, change) | {"role": message["role"]} for message in messages]
        own = {"messages": changed, "add_generation_prompt": add_generation_prompt}
        variables = {"tools": None, "documents": None} | _change_fields(extra, change) | self._variables | own
        try:
            return self._template.render(variables)  # not as keywords: a variable may be called `self`
        except Exception as error:  # a template is a foreign program: whatever it raises, it refuses the conversation
            raise TemplateError(f"The chat template cannot render this conversation: {error}") from error

    def _takes_two_calls(self) -> bool:
        """Llama 3.1's own template takes one call a message, and raises where there are more."""
        asked: dict[str, Any] = {"role": "user", "content": ""}
        messages = [asked, {"role": "assistant", "content": "", "tool_calls": _TWO_CALLS}]
        return _try(lambda change: self._run(messages, True, {}, change), str) is not None


def _try(rendering: Callable[[Change], str], change: Change) -> str | None:
    try:
        return rendering(change)
    except TemplateError:
        return None


def _change_fields(fields: Mapping[str, Any], change: Change) -> dict[str, Any]:
    return {name: map_strings(value, change, FIELDS) for name, value in fields.items()}


def _with_single_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A message with several tool calls becomes as many messages, the first with the content."""
    single: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            single.append(message)
            continue
        for i, call in enumerate(calls):
            content = message["content"] if i == 0 else ""
            single.append({**message, "content": content, "tool_calls": [call]})
    return single


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
