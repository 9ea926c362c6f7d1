"""The formats by the names that `--tool-call-parser` knows."""

from __future__ import annotations

from server.text.tool_calls.json_calls import JsonCallParser
from server.text.tool_calls.parser import CallParser
from server.text.tool_calls.pythonic_calls import PythonicCallParser

FORMATS: dict[str, type[CallParser]] = {"llama3_json": JsonCallParser, "pythonic": PythonicCallParser}
