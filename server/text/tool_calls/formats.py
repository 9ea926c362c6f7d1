"""The formats by their names in `--tool-call-parser`."""

from __future__ import annotations

from server.text.tool_calls.json_calls import CALL_TAG, HermesCallParser, JsonCallParser
from server.text.tool_calls.parser import CallParser
from server.text.tool_calls.pythonic_calls import PythonicCallParser

FORMATS: dict[str, type[CallParser]] = {
    "llama3_json": JsonCallParser,
    "pythonic": PythonicCallParser,
    "hermes": HermesCallParser,
    # vLLM's names for the same formats of later models
    "llama4_json": JsonCallParser,
    "llama4_pythonic": PythonicCallParser,
}
DEFAULT_FORMAT = "llama3_json"


def format_in(template: str) -> str:
    """The name of the format that a chat template shows to the model."""
    return "hermes" if CALL_TAG in template else DEFAULT_FORMAT
