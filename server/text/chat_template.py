"""Renders a conversation with the tokenizer's chat template. The users' text never becomes a control token.

The model's template is the operator's choice, but clients decide on its input. So its loops end at a deadline, and its
output has a bound. A template that comes with a request runs in a process of its own (`template_process`).

A template is a program that joins its own control tokens and the users' text into one string. In that string the two
look the same. So the template runs twice: on the conversation itself, and on the conversation with its text masked.
The mask replaces every character that occurs in a special token by one character that occurs in none. Then all special
tokens in the masked rendering are the template's own, even if the template trims, joins or cuts the text. Masking keeps
lengths, so the control tokens have the same positions in the plain rendering. The rest is encoded as plain text.

Templates branch on text (`if '</think>' in content`, `if schema.type == 'array'`). A masked text answers such
questions as the text itself (`MaskedText`), so both renderings take the same branches. This does not reach texts that
the template has made of several (`content ~ ''`). A comparison of the two renderings shows where they differ. Then a
lighter mask is tried: a mark before each character that can begin a special token. It is used only if it gives the
plain rendering and the control tokens of the masked rendering. If this fails too, the text is rendered under a mask
that can be undone afterwards. On all paths the users' text stays plain text.

Roles that every template knows (ROLES), and roles that this template compares with, are not masked. All other roles are
masked like text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2.nodes

from model.inputs.limits import MAX_TEMPLATE_BYTES
from server.text.masking import Change, Mask, MaskedText, Substitution, free_characters, masked_strings, translated
from server.text.special_tokens import Part, SpecialTokens
from server.text.template_environment import (
    DEADLINE,
    TemplateError,
    TemplateLengthError,
    TemplateLimitError,
    template_environment,
    with_deadlines,
)

ROLES = frozenset({"system", "user", "assistant", "tool", "ipython"})
_TWO_CALLS = [{"type": "function", "id": id, "function": {"name": "f", "arguments": {}}} for id in ("call_1", "call_2")]


class ChatTemplate:
    """A compiled template. Raises TemplateError if the source is not valid Jinja."""

    def __init__(self, source: str, *, special_tokens: Iterable[str], variables: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_BYTES:
            raise TemplateError(
                f"The chat template has {len(source)} characters; at most {MAX_TEMPLATE_BYTES} are read."
            )
        environment = template_environment()
        try:
            tree = environment.parse(source)
            names = tree.find_all(jinja2.nodes.Name)
            self.variables_read = frozenset(name.name for name in names if name.ctx == "load")
            self._roles = ROLES | _compared_names(tree)
            self._template = environment.from_string(with_deadlines(tree))
        except Exception as error:  # Jinja's errors, and Python's in the code that Jinja generates: a MemoryError, too
            raise TemplateError(f"The chat template is not valid: {error or type(error).__name__}") from error
        self._variables = dict(variables)
        special_tokens = list(special_tokens)
        self._parts = SpecialTokens(special_tokens).split
        self._letters = sorted({char for token in special_tokens for char in token if not char.isspace()})
        self._initials = {token[0] for token in special_tokens}
        self._mask = Mask(self._letters)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        max_chars: float = math.inf,
        timeout_s: float = math.inf,
    ) -> list[Part]:
        """Renders a conversation. `extra` holds further template variables, such as `tools` and `documents`; their text
        is untrusted, like the messages' text.

        With `continue_final_message` the rendering ends with the last message's text, which the model continues.

        Raises:
            TemplateLengthError: the rendering has more than `max_chars` characters.
            TemplateLimitError: the template took longer than `timeout_s`, or there is not enough memory.
            TemplateError: the template cannot render the conversation.
        """
        limits = (max_chars, time.monotonic() + timeout_s)
        try:
            return self._parts_of(messages, add_generation_prompt, continue_final_message, dict(extra or {}), limits)
        except MemoryError as error:
            raise TemplateLimitError("The chat template needs more memory than a conversation may take.") from error
        except TimeoutError as error:
            message = f"The chat template took longer than {timeout_s:g} s for this conversation and was stopped."
            raise TemplateLimitError(message) from error

    def _parts_of(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: dict[str, Any],
        limits: tuple[float, float],
    ) -> list[Part]:
        if any(len(message.get("tool_calls", ())) > 1 for message in messages) and not self._takes_two_calls(limits):
            messages = _with_single_calls(messages)
        end = ""
        if continue_final_message:
            (end,) = free_characters([messages, extra], 1)
            messages = [*messages[:-1], _with_end(messages[-1], end)]

        def rendering(change: Change | None) -> str:
            text = self._rendered(messages, add_generation_prompt, extra, change, limits)
            return _cut_at(text, end) if end else text

        plain = rendering(None)
        masked = _try(rendering, self._mask)
        if masked is not None:
            parts = self._cut_like(plain, masked)
            if parts is not None:
                return parts
        mark, *stand_ins = free_characters([messages, extra], 1 + len(self._letters))
        marked = _try(rendering, lambda text: translated(text, {ord(char): mark + char for char in self._initials}))
        if masked is not None and marked is not None and marked.replace(mark, "") == plain:
            parts = _merge_marked(self._parts(marked), mark)
            if _specials(parts) == _specials(self._parts(masked)):
                return parts
        substitution = Substitution(self._letters, stand_ins)
        parts = self._parts(rendering(substitution))
        return [part if part.special else Part(substitution.undo(part.text), False) for part in parts]

    def _cut_like(self, plain: str, masked: str) -> list[Part] | None:
        """`plain`, cut at the control tokens of `masked`; None: the two differ by more than the mask."""
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

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
        change: Change | None,
        limits: tuple[float, float],
    ) -> str:
        """Renders the conversation, with all strings but known roles under the mask `change`, if there is one.

        `limits` are the most characters of the rendering, and the deadline. A mask may double the characters."""
        max_chars, deadline = limits
        max_chars *= 1 if change is None else 2
        own: dict[str, Any] = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            if change is not None:
                own["messages"] = [self._masked_message(message, change) for message in messages]
                extra = _masked_fields(extra, change)
            variables = {"tools": None, "documents": None, **extra} | self._variables | own | {DEADLINE: deadline}
            pieces, num_chars = [], 0
            for piece in self._template.generate(variables):  # not as keywords: a variable may be called `self`
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise TemplateLengthError(f"The chat template writes more than {max_chars:.0f} characters.")
            text = "".join(pieces)
            text.encode()  # fails for half of a surrogate pair, which a template can write
            return text
        except (MemoryError, TimeoutError, TemplateLengthError):
            raise
        except Exception as error:  # templates are untrusted: every exception is a refusal
            raise TemplateError(f"The chat template cannot render this conversation: {error}") from error

    def _masked_message(self, message: Mapping[str, Any], change: Change) -> dict[str, Any]:
        role = message["role"]
        return _masked_fields(message, change) | {"role": role if role in self._roles else MaskedText(role, change)}

    def _takes_two_calls(self, limits: tuple[float, float]) -> bool:
        """Whether a message may have several tool calls. Llama 3.1's template raises an error for more than one."""
        asked: dict[str, Any] = {"role": "user", "content": ""}
        messages = [asked, {"role": "assistant", "content": "", "tool_calls": _TWO_CALLS}]
        return _try(lambda change: self._rendered(messages, True, {}, change, limits), None) is not None


def _compared_names(tree: jinja2.nodes.Template) -> frozenset[str]:
    """The names with which the template compares anything, such as `critic` in `message.role == 'critic'`."""
    compared = (
        const.value for compare in tree.find_all(jinja2.nodes.Compare) for const in compare.find_all(jinja2.nodes.Const)
    )
    return frozenset(value for value in compared if isinstance(value, str) and value.isidentifier())


def _try(rendering: Callable[[Change | None], str], change: Change | None) -> str | None:
    try:
        return rendering(change)
    except TemplateError:
        return None


def _masked_fields(fields: Mapping[str, Any], change: Change) -> dict[str, Any]:
    return {name: masked_strings(value, change) for name, value in fields.items()}


def _with_single_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Splits a message with several tool calls into one message per call. The first one keeps the content."""
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
    """The text before the end mark. If the space after the mark is missing, the template trims text, and the result is
    trimmed as well."""
    at = text.rfind(end)
    if at < 0:
        raise TemplateError("The chat template leaves out the message that is to be continued.")
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()


def _merge_marked(parts: list[Part], mark: str) -> list[Part]:
    """Joins special tokens that follow a mark to the text before them, because they are user text. Removes the
    marks."""
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
