"""Random JSON schemas, of what answers usually are: objects, arrays, numbers, strings, choices."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_names = st.text('abcü"\\', min_size=1, max_size=4)
_leaves = st.sampled_from(
    [
        {"type": "integer", "minimum": -99, "maximum": 999},
        {"type": "number", "minimum": -5, "maximum": 5},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"enum": ["ü", 1, None, [True]]},
        {"const": {"a": "語"}},
    ]
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_names, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


schemas = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        _objects(inner),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)
