"""The result of one part."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# `wrong`: a number is wrong. A part did not finish if it `failed` (an error or a crash) or was `late` (its time limit).
STATUSES = ("right", "wrong", "failed", "late")


@dataclass(kw_only=True)
class Result:
    """What a part has found: filled while it runs."""

    status: str = "right"
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)  # in plain words
    lines: list[str] = field(default_factory=list)  # Markdown
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        """Whether something is wrong or missing."""
        return self.status != "right"

    def wrong(self, problem: str) -> None:
        """Notes a wrong number."""
        self.status = "wrong"
        self.problems.append(problem)

    def say(self, line: str) -> None:
        """Adds a line to the report, and prints it: if the process dies, it is in the log."""
        self.lines.append(line)
        print(line, flush=True)

    def write(self, path: Path) -> None:
        """Stores it as JSON; the file is whole or not there."""
        spare = path.with_suffix(".new")
        spare.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        spare.replace(path)

    @classmethod
    def read(cls, path: Path) -> Result:
        """The inverse of `write`."""
        return cls(**json.loads(path.read_text()))
