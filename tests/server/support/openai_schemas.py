"""OpenAI's published schemas as the judge of what the server sends."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from tests.server.conftest import SHARED

SCHEMAS = SHARED / "data/openai/openai_schemas.json"


def validate(name: str, value: Any) -> None:
    """Fails where `value` is not a `name`. Where the schemas are not at hand the callers' own assertions must do: one
    test (`test_the_schemas_are_at_hand`) then skips and says so."""
    if not SCHEMAS.is_file():
        return
    document = json.loads(SCHEMAS.read_text())
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)
