"""OpenAI's published schemas as the judge of what the server sends."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs

SHARED = Path(__file__).parents[4] / "shared"
SCHEMAS = SHARED / "data/openai/openai_schemas.json"
# A chunk of a streamed completion has no published schema. It is judged by that of a whole one, except that its
# `finish_reason` may be null, and `usage` too, as OpenAI's documentation of `include_usage` says.
COMPLETION_CHUNK = "CompletionChunk"


def validate(name: str, value: Any) -> None:
    """Fails where `value` is not a `name`. Where the schemas are not at hand the callers' own assertions must do: one
    test (`test_the_schemas_are_at_hand`) then skips and says so."""
    if SCHEMAS.is_file():
        _validator(name).validate(value)


@cache
def _validator(name: str) -> jsonschema_rs.Draft202012Validator:
    """Of the package in Rust, which judges an event in 3 us. Written in Python, it takes 190."""
    components = json.loads(SCHEMAS.read_text())["components"]
    components["schemas"][COMPLETION_CHUNK] = _completion_chunk(components["schemas"]["CreateCompletionResponse"])
    schema = {"$ref": f"#/components/schemas/{name}", "components": components}
    return jsonschema_rs.Draft202012Validator(schema)


def _completion_chunk(completion: dict[str, Any]) -> dict[str, Any]:
    chunk: dict[str, Any] = copy.deepcopy(completion)
    fields = chunk["properties"]
    for holder, name in ((fields["choices"]["items"]["properties"], "finish_reason"), (fields, "usage")):
        holder[name] = {"anyOf": [holder[name], {"type": "null"}]}
    return chunk
