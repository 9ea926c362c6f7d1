"""A start of a server with an empty compile cache, and one with what the first has left there."""

from __future__ import annotations

import tarfile
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from scripts.building.precompiled import CHOICES
from scripts.lab.chip.load import serve_flags
from scripts.lab.chip.parts import Options, Result
from scripts.lab.startup import start

COLD, WARM = "cold", "warm"
GOALS_S = {COLD: 60, WARM: 15}  # of an 8B on an H100; not reached or missed on a chip yet


def run(options: Options, result: Result) -> None:
    """Fills the result."""

    def show(name: str, found: dict[str, Any]) -> None:
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in found["phases"].items())
        goal = f"goal of 8B on an H100: {GOALS_S[name]} s"
        result.say(f"- {name}: ready after {found['ready']:.1f} s ({goal}), {found['cpu']:.1f} CPU s ({phases})")

    with tempfile.TemporaryDirectory() as cache:
        flags = ["--compile-cache", cache, *serve_flags(options)]
        if WARM not in result.before:  # it needs what a cold one leaves
            result.before.pop(COLD, None)
        result.measure({name: partial(_start, flags) for name in (COLD, WARM)}, show)
        if (choices := Path(cache, CHOICES)).exists() and result.kept_in is not None:
            kept = result.kept_in.with_name("choices.tgz")
            with tarfile.open(kept, "w:gz") as tar:
                for part in (choices, Path(cache, "topologies")):
                    tar.add(part, part.name)
            result.say(f"- XLA's choices of kernels are in {kept}: `scripts.precompile` compiles with them.")


def _start(flags: list[str]) -> dict[str, Any]:
    return asdict(start(flags))
