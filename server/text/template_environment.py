"""The Jinja environment of Hugging Face chat templates, with the tags, filters and globals that `transformers` gives to
templates. It is implemented here because the import of `transformers` takes most of a second."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, TemplateRuntimeError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

DEADLINE = "the deadline"  # the variable with the time at which loops end; templates cannot write this name
_ITEMS_UNTIL_THE_DEADLINE = "items_until_the_deadline"


class TemplateError(ValueError):
    """The template refuses the conversation or cannot be run. The message may be shown to the client."""


class TemplateLengthError(TemplateError):
    """The rendering has more characters than it may."""


class TemplateLimitError(TemplateError):
    """The template took more time or memory than it may, or ended its process."""


def template_environment() -> Environment:
    """A sandboxed environment. Templates cannot reach Python's internal attributes or change the values that they
    get."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
    environment.filters |= {"tojson": _to_json, _ITEMS_UNTIL_THE_DEADLINE: _items_until_the_deadline}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _namespace,
    }
    return environment


def with_deadlines(tree: nodes.Template) -> nodes.Template:
    """Changes all loops of the template: they raise TimeoutError after the deadline, as all calls do."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = nodes.Filter(
            loop.iter, _ITEMS_UNTIL_THE_DEADLINE, [], [], None, None, lineno=loop.lineno, environment=tree.environment
        )
    return tree


@pass_context
def _items_until_the_deadline(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_deadline(context)
        yield item


class _Environment(ImmutableSandboxedEnvironment):
    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_deadline(context)  # macros and recursive loops call themselves
        return super().call(context, obj, *args, **kwargs)


def _check_deadline(context: Context) -> None:
    if time.monotonic() > context[DEADLINE]:
        raise TimeoutError


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
