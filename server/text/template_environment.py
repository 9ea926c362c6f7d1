"""The Jinja environment of Hugging Face chat templates, with the tags, filters and globals that `transformers` gives to
templates. It is implemented here because the import of `transformers` takes most of a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, TemplateRuntimeError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def template_environment() -> Environment:
    """A sandboxed environment. Templates cannot reach Python's internal attributes or change the values that they
    get."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _namespace,
    }
    return environment


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Unlike Jinja's own it does not escape `<`, `>`, `&` and `'`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRuntimeError(message)


class _Dict:
    """The function `dict`, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    values = dict(*args, **kwargs)
    for name in values:
        _check_name(name)
    return _Namespace(values)


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no names that begin with an underscore, such as {name!r}")
