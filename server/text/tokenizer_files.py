"""The small files next to a tokenizer: the tokens that templates use by name, and the chat templates.

`transformers.AutoTokenizer` does not replace this: it refuses a token that is an object without `__type`, its errors do
not name the file, and it parses `tokenizer.json` in Python before `tokenizers` reads it (Llama 3: 0.26 s and 80 MB).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from model.inputs.fetched import TOOL_USE_FILE
from model.inputs.json_file import read_fields, read_text
from model.inputs.limits import MAX_TEMPLATE_BYTES
from model.inputs.schema import TEXT, described_as

TOOL_USE = "tool_use"  # the name of the template for conversations with tools


@dataclass(frozen=True, kw_only=True)
class ChatTemplates:
    """The sources of a model's chat templates, as `transformers` chooses among named ones."""

    default: str | None = None
    tool_use: str | None = None  # for conversations with tools; None: the default one

    @classmethod
    def named(cls, templates: Mapping[str, str]) -> ChatTemplates:
        """The templates called "default" and "tool_use". Templates of other names are ignored."""
        return cls(default=templates.get("default"), tool_use=templates.get(TOOL_USE))

    def for_transformers(self) -> str | dict[str, str] | None:
        """The value of `chat_template` in `tokenizer_config.json` and of a tokenizer of `transformers`."""
        if self.tool_use is None:
            return self.default
        return {"default": self.default, TOOL_USE: self.tool_use} if self.default else {TOOL_USE: self.tool_use}


class _SpecialToken(msgspec.Struct):
    content: TEXT


_Token = Annotated[str | _SpecialToken, described_as("a text, or an object with a text as its content")]


class _SpecialTokensFile(msgspec.Struct):
    """`special_tokens_map.json`: the tokens that templates use by name."""

    bos_token: _Token | None = None
    eos_token: _Token | None = None
    pad_token: _Token | None = None
    unk_token: _Token | None = None
    sep_token: _Token | None = None
    cls_token: _Token | None = None
    mask_token: _Token | None = None

    def by_name(self) -> dict[str, str]:
        named = {name: getattr(self, name) for name in _SpecialTokensFile.__struct_fields__}
        return {name: token if isinstance(token, str) else token.content for name, token in named.items() if token}


class _NamedTemplate(msgspec.Struct):
    name: TEXT
    template: TEXT


class _TokenizerConfigFile(_SpecialTokensFile):
    """`tokenizer_config.json`."""

    chat_template: (
        Annotated[
            str | list[_NamedTemplate] | dict[str, str],
            described_as(
                "a text, a list of objects with a text each as name and template, or an object of texts by name"
            ),
        ]
        | None
    ) = None

    def templates(self) -> ChatTemplates:
        template = self.chat_template
        if isinstance(template, list):
            template = {entry.name: entry.template for entry in template}
        return ChatTemplates.named(template) if isinstance(template, dict) else ChatTemplates(default=template)


def special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and so on, from both files. `tokenizer_config.json` overrides `special_tokens_map.json`."""
    path = folder / "special_tokens_map.json"
    tokens = read_fields(path, _SpecialTokensFile).by_name() if path.exists() else {}
    return tokens | _tokenizer_config(folder).by_name()


def chat_templates(folder: Path) -> ChatTemplates:
    """The templates of `chat_template.jinja` and `additional_chat_templates/`. If there is no such file, those of
    `tokenizer_config.json`."""
    paths = {"default": folder / "chat_template.jinja", TOOL_USE: folder / TOOL_USE_FILE}
    files = {name: read_text(path, MAX_TEMPLATE_BYTES) for name, path in paths.items() if path.exists()}
    return ChatTemplates.named(files) if files else _tokenizer_config(folder).templates()


def _tokenizer_config(folder: Path) -> _TokenizerConfigFile:
    path = folder / "tokenizer_config.json"
    return read_fields(path, _TokenizerConfigFile) if path.exists() else _TokenizerConfigFile()
