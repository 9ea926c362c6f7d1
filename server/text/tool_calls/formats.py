"""The formats by their names in `--tool-call-parser`."""

from __future__ import annotations

from server.text.tool_calls.json_calls import HermesCallParser, JsonCallParser
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
