"""The Jinja environment that Hugging Face chat templates are written for, sandboxed."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


def template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that Hugging Face templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.code_generator_class = _CodeGenerator
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Computes no expression while it compiles: `{{ 10 ** (10 ** 10) }}` would hold up the start for good."""

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; when rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the attribute's form is jinja2's

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, separators: tuple[str, str] | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
