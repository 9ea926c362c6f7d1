"""The Jinja environment that Hugging Face chat templates are written for: `transformers`' own, sandboxed."""

from __future__ import annotations

from typing import Any

from jinja2.compiler import CodeGenerator
from jinja2.nodes import Expr, Impossible, TemplateData
from jinja2.sandbox import ImmutableSandboxedEnvironment


def template_environment() -> ImmutableSandboxedEnvironment:
    """The environment of `transformers`, with its tags, filters and globals. It computes nothing at compile time."""
    from server.text.transformers_parts import compile_jinja_template

    # No function returns the environment, so it is read from a compiled template. The overlay is a copy to change.
    environment: ImmutableSandboxedEnvironment = compile_jinja_template("").environment.overlay(optimized=False)
    environment.code_generator_class = _CodeGenerator
    return environment


class _CodeGenerator(CodeGenerator):
    """Computes no expression at compile time: `{{ 10 ** (10 ** 10) }}` would block the start forever."""

    def _output_child_to_const(self, node: Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, TemplateData):
            raise Impossible
        return super()._output_child_to_const(node, frame, finalize)
