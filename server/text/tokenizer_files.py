"""The small files next to a tokenizer: the tokens that templates use by name, and the chat template.

`transformers.AutoTokenizer` does not replace this: it refuses a token that is an object without `__type`, its errors do
not name the file, and it parses `tokenizer.json` in Python before `tokenizers` reads it (Llama 3: 0.26 s and 80 MB).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from model.inputs.json_file import read_fields, read_text
from model.inputs.limits import MAX_TEMPLATE_BYTES
from model.inputs.schema import TEXT, described_as


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
    """`tokenizer_config.json`. If it has several templates, the one called "default" is for plain conversations."""

    chat_template: (
        Annotated[
            str | list[_NamedTemplate] | dict[str, str],
            described_as(
                "a text, a list of objects with a text each as name and template, or an object of texts by name"
            ),
        ]
        | None
    ) = None

    def template(self) -> str | None:
        template = self.chat_template
        if isinstance(template, list):
            template = {entry.name: entry.template for entry in template}
        return template.get("default") if isinstance(template, dict) else template


def special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and so on, from both files. `tokenizer_config.json` overrides `special_tokens_map.json`."""
    path = folder / "special_tokens_map.json"
    tokens = read_fields(path, _SpecialTokensFile).by_name() if path.exists() else {}
    return tokens | _tokenizer_config(folder).by_name()


def chat_template(folder: Path) -> str | None:
    """The template of `chat_template.jinja`; if there is no such file, that of `tokenizer_config.json`."""
    path = folder / "chat_template.jinja"
    return read_text(path, MAX_TEMPLATE_BYTES) if path.exists() else _tokenizer_config(folder).template()


def _tokenizer_config(folder: Path) -> _TokenizerConfigFile:
    path = folder / "tokenizer_config.json"
    return read_fields(path, _TokenizerConfigFile) if path.exists() else _TokenizerConfigFile()
