"""The Jinja environment that Hugging Face chat templates are written for: `transformers`' own, sandboxed."""

from __future__ import annotations

from typing import Any

from jinja2.compiler import CodeGenerator
from jinja2.nodes import Expr, Impossible, TemplateData
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_BITS = 100_000  # of a power or product of integers
MAX_REPEATED = 1_000_000  # items of a string or list that is repeated with `*`


def template_environment() -> ImmutableSandboxedEnvironment:
    """The environment of `transformers`, with its tags, filters and globals. It computes nothing at compile time."""
    from server.text.transformers_parts import compile_jinja_template

    # No function returns the environment, so it is read from a compiled template. The overlay is a copy to change.
    environment: ImmutableSandboxedEnvironment = compile_jinja_template("").environment.overlay(optimized=False)
    environment.code_generator_class = _CodeGenerator
    environment.intercepted_binops = frozenset(("**", "*"))
    setattr(environment, "call_binop", _bounded_operation)  # noqa: B010 - mypy rejects an assignment to a method
    return environment


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
