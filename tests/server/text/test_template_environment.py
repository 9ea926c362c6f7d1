"""The environment of chat templates, next to that of `transformers`."""

from __future__ import annotations

import pytest

from server.text.template_environment import template_environment

WITHIN = [
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=2) }}|{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true, ensure_ascii=true) }}",
    "{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{% generation %}\n  {{ messages[0].content }}\n{% endgeneration %}\n.",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(a=1, self=2) %}{% set ns.a = 3 %}{{ ns.a }}{{ ns.self }}{{ ns.b is defined }}",
    "{{ namespace({'a': 4}).a }}{{ dict(a=1, **{'b': 2}) }}{{ dict([('x', 1)]) }}{{ dict.fromkeys('abca') }}",
    "{{ dict.fromkeys('ab', 7) }}",
    "{% if true %}\n    indented\n  {% endif %}\n\nend\n",
    "{{ undefined_name is defined }}{{ undefined_name }}{{ messages[5] is defined }}",
    "{{ range(3) | list }}{{ 'a,b'.split(',') | join('-') }}{{ ' x ' | trim | upper }}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}{% set t %}a{% endset %}{{ t }}",
    "{{ strftime_now('%Y') }}{{ messages | map(attribute='role') | list }}{{ '%s' | format('a') }}{{ 'a' | e }}",
    "{% call(x) namespace %}{% endcall %}",
    "{{ raise_exception('no') }}",
    "{{ ''.__class__ }}|{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{{ dict.__class__ }}",
    "{{ dict.__init__.__globals__ }}",
    "{{ dict.mro() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ 'a'.format_map({}) }}{{ '{0.__class__}'.format(1) }}",
    "{{ messages[0].content.nothing.more }}",
    "{{ cycler('a', 'b').next() }}{{ joiner()() }}",
    "{{ now() }}",
    "{% include 'x' %}",
    "{{ {'a': undefined_name} | tojson }}",
]
MESSAGES = [{"role": "user", "content": "1 < 2 & é\n"}, {"role": "assistant", "content": "yes"}]


def rendered(environment, source: str) -> tuple[str, str]:
    """The text, or the type of the error: the words differ."""
    try:
        return "text", environment.from_string(source).render({"messages": MESSAGES})
    except Exception as error:
        return "error", type(error).__name__


@pytest.fixture(scope="module")
def of_transformers():
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template("").environment


@pytest.mark.parametrize("source", WITHIN)
def test_a_template_gives_what_it_gives_in_transformers(source, of_transformers):
    assert rendered(template_environment(), source) == rendered(of_transformers, source)


def test_a_template_has_the_names_that_it_has_in_transformers(of_transformers):
    own = template_environment()
    assert own.globals.keys() == of_transformers.globals.keys()
    assert own.filters.keys() == of_transformers.filters.keys()
    assert own.tests.keys() == of_transformers.tests.keys()
    for name in (
        "trim_blocks",
        "lstrip_blocks",
        "keep_trailing_newline",
        "autoescape",
        "newline_sequence",
        "undefined",
    ):
        assert getattr(own, name) == getattr(of_transformers, name), name
