"""Refuses to build a wheel: it would install top-level packages named `model`, `server` and `scripts`."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    """Hatchling's hook: it runs before any wheel is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            raise RuntimeError(
                "pallas-serve is not built as a wheel: clone the repository and run scripts/serve in it, or install "
                "the checkout with `pip install --editable .`"
            )
