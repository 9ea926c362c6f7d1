"""The formats by their names in `--tool-call-parser`."""

from __future__ import annotations

from server.text.tool_calls.json_calls import CALL_TAG, HermesCallParser, JsonCallParser, XlamCallParser
from server.text.tool_calls.parser import CallParser
from server.text.tool_calls.pythonic_calls import PythonicCallParser

FORMATS: dict[str, type[CallParser]] = {
    "llama3_json": JsonCallParser,
    "pythonic": PythonicCallParser,
    "hermes": HermesCallParser,
    "xlam": XlamCallParser,
    # vLLM's names for the same formats of later models
    "llama4_json": JsonCallParser,
    "llama4_pythonic": PythonicCallParser,
}
DEFAULT_FORMAT = "llama3_json"
# what a template has only if it shows the format to the model -> the format
_SHOWN = {CALL_TAG: "hermes", '[{"name": "tool_call_name", "arguments":': "xlam"}


def format_in(template: str) -> str:
    """The name of the format that a chat template shows to the model."""
    return next((name for mark, name in _SHOWN.items() if mark in template), DEFAULT_FORMAT)
