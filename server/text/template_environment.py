"""The Jinja environment that Hugging Face chat templates are written for: `transformers`' own, sandboxed."""

from __future__ import annotations

from typing import Any

from jinja2.compiler import CodeGenerator
from jinja2.nodes import Expr, Impossible, TemplateData
from jinja2.sandbox import ImmutableSandboxedEnvironment


def template_environment() -> ImmutableSandboxedEnvironment:
    """The environment of `transformers`, with its tags, filters and globals; it computes nothing while it compiles."""
    from server.text.transformers_parts import compile_jinja_template

    # No function returns the environment, but a compiled template knows it. The overlay is a copy that may be changed.
    environment: ImmutableSandboxedEnvironment = compile_jinja_template("").environment.overlay(optimized=False)
    environment.code_generator_class = _CodeGenerator
    return environment


class _CodeGenerator(CodeGenerator):
    """Computes no expression while it compiles: `{{ 10 ** (10 ** 10) }}` would hold up the start for good."""

    def _output_child_to_const(self, node: Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, TemplateData):
            raise Impossible
        return super()._output_child_to_const(node, frame, finalize)
