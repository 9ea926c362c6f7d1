"""The Jinja environment that Hugging Face chat templates are written for, sandboxed.

It has what `transformers` gives to a template, and the tests compare the two. The package itself is not imported: that
would take 0.7 s of every start, in each process that reads a template or a tokenizer.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Expr, Impossible, Node, Scope, TemplateData
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_BITS = 100_000  # of a power or product of integers
MAX_REPEATED = 1_000_000  # items of a string or list that is repeated with `*`


def template_environment() -> ImmutableSandboxedEnvironment:
    """The environment, with its tags, filters and globals. It computes nothing at compile time."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dicts(),
        "namespace": _Namespace,
    }
    environment.code_generator_class = _CodeGenerator
    environment.intercepted_binops = frozenset(("**", "*"))
    setattr(environment, "call_binop", _bounded_operation)  # noqa: B010 - mypy rejects an assignment to a method
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model has written, for training. A server has no use for the marks."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dicts:
    """`dict` without the attributes of Python's type."""

    def __call__(self, *content: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*content, **entries)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore: these lead to the interpreter."""

    def __init__(*args: Any, **entries: Any) -> None:  # an entry may be called `self`
        self, *content = args
        entries = dict(*content, **entries)
        for name in entries:
            _check_name(name)
        Namespace.__init__(self, entries)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a name in a namespace begins with an underscore: {name!r}")


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter would write `<` as an escape, for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded_operation(context: Context, operator: str, left: Any, right: Any) -> Any:
    """`left ** right` or `left * right`. Raises OverflowError if the result is too large.

    Such an operation is one call into C. It holds the interpreter's lock, and no time limit interrupts it.
    """
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
            raise OverflowError(f"{operator}: the result has more than {MAX_BITS} bits")
        return left**right
    for repeated, count in ((left, right), (right, left)):
        if isinstance(count, int):
            if isinstance(repeated, int) and repeated.bit_length() + count.bit_length() > MAX_BITS:
                raise OverflowError(f"{operator}: the result has more than {MAX_BITS} bits")
            if isinstance(repeated, (str, bytes, list, tuple)) and len(repeated) * count > MAX_REPEATED:
                raise OverflowError(f"{operator}: the result has more than {MAX_REPEATED} items")
    return left * right


class _CodeGenerator(CodeGenerator):
    """Computes no expression at compile time: `{{ 10 ** (10 ** 10) }}` would block the start forever."""

    def _output_child_to_const(self, node: Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, TemplateData):
            raise Impossible
        return super()._output_child_to_const(node, frame, finalize)
