"""Runs one part of `scripts/check` in this process: `python -m scripts.lab.chip PART OPTIONS RESULT_FILE`."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from model.inputs.words import described
from scripts.lab.chip.parts import PARTS, Options, Result


def main(part: str, options: str, path: str) -> None:
    """Calls the part's function. The result is stored line by line."""
    result = Result.begun(Path(path))
    try:
        module, _, function = PARTS[part].runs.partition(":")
        getattr(importlib.import_module(f"scripts.lab.chip.{module}"), function)(Options.from_json(options), result)
    except Exception as error:
        traceback.print_exc()
        result.status = "failed" if result.status == "right" else result.status
        result.problems.append(described(error))
    result.write(Path(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
