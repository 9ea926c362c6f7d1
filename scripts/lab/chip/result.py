"""The result of one part."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
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
    before: dict[str, Any] = field(default_factory=dict)  # figures of the run that this one goes on with
    kept_in: Path | None = None  # where it is stored while it is filled

    @classmethod
    def begun(cls, path: Path) -> Result:
        """A result that is stored in `path` with every line, as one that is `late`. It goes on with what `path` has, if
        that did not finish."""
        earlier = cls.read(path) if path.exists() else cls()
        before = earlier.figures if earlier.status in ("failed", "late") else {}
        return cls(before=before, kept_in=path)

    @property
    def is_bad(self) -> bool:
        """Whether something is wrong or missing."""
        return self.status != "right"

    def wrong(self, problem: str) -> None:
        """Notes a wrong number."""
        self.status = "wrong"
        self.problems.append(problem)

    def say(self, line: str) -> None:
        """Adds a line to the report, stores it, and prints it: nothing is lost if the process dies."""
        self.lines.append(line)
        if self.kept_in is not None:
            replace(self, status="late").write(self.kept_in)
        print(line, flush=True)

    def write(self, path: Path) -> None:
        """Stores it as JSON; the file is whole or not there."""
        spare = path.with_suffix(".new")
        content = {name: value for name, value in vars(self).items() if name not in ("before", "kept_in")}
        spare.write_text(json.dumps(content, indent=1) + "\n")
        spare.replace(path)

    @classmethod
    def read(cls, path: Path) -> Result:
        """The inverse of `write`."""
        return cls(**json.loads(path.read_text()))
