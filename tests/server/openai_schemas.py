"""OpenAI's published schemas as the judge of what the server sends."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.server.conftest import SHARED

SCHEMAS = SHARED / "data/openai/openai_schemas.json"


def validate(name: str, value: Any) -> None:
    """Fails where `value` is not a `name`; skips where the schemas are not at hand."""
    if not SCHEMAS.is_file():
        pytest.skip("OpenAI's schemas are not in ../shared/data")
    document = json.loads(SCHEMAS.read_text())
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)
