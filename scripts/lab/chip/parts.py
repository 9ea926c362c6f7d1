"""The parts of a check: their names, what all of them are asked for, and what one has found."""

from __future__ import annotations

import dataclasses
import json
import secrets
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from model.inputs.words import described
from scripts.flags.settings import EngineSettings
from scripts.lab.tables import Table

DEFAULT_MODELS = ("llama-3.2-1b", "llama-3.1-8b")
ROOT = Path(__file__).parents[3]


class Part(NamedTuple):
    """A part of the check."""

    title: str
    limit_s: int  # at most; a part also ends when all time is used. The sum is more: few parts need their limit.
    runs: str  # module:function, called with the options and the result that it fills


PARTS = {  # those first that tell most of what is not known yet
    "versions": Part("Versions, driver, memory, clocks", 30, "versions:run"),
    "dispatch": Part("Nodes of graphs that are set anew", 60, "dispatch:run"),
    "sanitizer": Part("Kernels under compute-sanitizer", 90, "sanitizer:run"),
    "steps": Part("Whole steps", 200, "steps:run"),
    "load": Part("Throughput", 200, "load:run"),
    "starts": Part("A cold and a warm start", 120, "starts:run"),
    "peers": Part("PyTorch and transformers on this card", 120, "torch_peers:run"),
    "elsewhere": Part("Programs made without the chip", 150, "made_elsewhere:run"),
    "kernels": Part("Kernels against float32", 200, "kernels:run"),
    "pool": Part("Kernels in a pool of serving size", 100, "kernels:run_in_a_large_pool"),
    "text": Part("Text of the served demo against a CPU's", 120, "text:run"),
    "engines": Part("Two engines from the compile cache", 120, "text:run_two_engines"),
    "speed": Part("Kernels' speed", 150, "speed:run"),
}
WORDS = {
    "right": "in order",
    "wrong": "WRONG",  # a number
    "failed": "did not finish",  # an error or a crash
    "late": "did not finish in its time",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of all parts."""

    device: str  # cpu, tpu or cuda
    rehearse: bool  # tiny shapes
    models: tuple[str, ...]  # presets, with random weights
    seed: int
    limit_s: float  # of all parts together

    @classmethod
    def make(cls, *, device: str, rehearse: bool, models: tuple[str, ...], seed: int | None, limit_s: float) -> Options:
        """The options, with what was not asked for."""
        return cls(
            device=device,
            rehearse=rehearse,
            models=models or (("demo",) if rehearse else DEFAULT_MODELS),
            seed=secrets.randbelow(1 << 30) if seed is None else seed,
            limit_s=limit_s,
        )

    @classmethod
    def from_json(cls, text: str) -> Options:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**fields | {"models": tuple(fields["models"])})

    def to_json(self) -> str:
        """The options as text."""
        return json.dumps(dataclasses.asdict(self))

    def settings(self, model: str, **fields: object) -> EngineSettings:
        """The settings of an engine over `model`, a preset or the demo."""
        if model == "demo":
            return EngineSettings(device=self.device, **fields)  # type: ignore[arg-type]
        return EngineSettings(model=f"preset:{model}", load_format="dummy", device=self.device, **fields)  # type: ignore[arg-type]


@dataclass(kw_only=True)
class Result:
    """What a part has found: filled while it runs."""

    status: str = "right"  # of WORDS
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)  # in plain words
    lines: list[str] = field(default_factory=list)  # Markdown
    figures: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)  # measurements that were not made
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

    def measure(self, works: Mapping[str, Callable[[], Any]], show: Callable[[str, Any], None]) -> None:
        """Fills `figures`, measurement by measurement, and shows each. Those of the run that this one goes on with are
        only shown. One that raises is a problem, stays unknown, and does not stop the next."""
        self.unknown = [name for name in works if name not in self.before]
        for name, work in works.items():
            try:
                found = self.before[name] if name in self.before else work()
            except Exception as error:
                traceback.print_exc()
                self.status = "failed" if self.status == "right" else self.status
                self.problems.append(f"{name}: {described(error)}")
                continue
            self.found(name, found)
            show(name, found)

    def found(self, name: str, figures: Any) -> None:
        """Keeps the figures of a measurement."""
        self.figures[name] = figures
        self.unknown = [other for other in self.unknown if other != name]

    def table(self, columns: Mapping[str, str]) -> Table:
        """A table in the report, whose rows are stored one by one."""
        return Table(columns, self.say)

    def say(self, line: str) -> None:
        """Adds a line to the report, stores it, and prints it: nothing is lost if the process dies."""
        self.lines.append(line)
        if self.kept_in is not None:
            replace(self, status="late").write(self.kept_in)
        print(line, flush=True)

    def write(self, path: Path) -> None:
        """Stores it as JSON; the file is whole or not there."""
        spare = path.with_suffix(".new")
        spare.write_text(json.dumps(self.content(), indent=1) + "\n")
        spare.replace(path)

    def content(self) -> dict[str, Any]:
        """What is stored."""
        return {name: value for name, value in vars(self).items() if name not in ("before", "kept_in")}

    @classmethod
    def read(cls, path: Path) -> Result:
        """The inverse of `write`."""
        return cls(**json.loads(path.read_text()))
