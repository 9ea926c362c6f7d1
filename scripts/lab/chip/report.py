"""The report of a run: Markdown for people, JSON with all figures."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import UTC, datetime
from pathlib import Path

from scripts.lab.chip import PARTS
from scripts.lab.chip.options import Options
from scripts.lab.chip.result import Result

TITLES = {
    "versions": "Versions, driver, memory, clocks",
    "kernels": "Kernels against float32",
    "pool": "Kernels in a pool of serving size",
    "text": "Text of the served demo against a CPU's",
    "engines": "Two engines from the compile cache",
    "speed": "Kernels' speed",
    "steps": "Whole steps",
    "load": "Throughput",
}
WORDS = {
    "right": "in order",
    "wrong": "WRONG",
    "failed": "did not finish",
    "late": "did not finish in its time",
}


def write_report(folder: Path, options: Options, results: dict[str, Result]) -> tuple[Path, Path]:
    """Writes `check-<chip>-<date>.md` and `.json` to `folder`, and returns their paths."""
    found = results["versions"].figures if "versions" in results else {}
    chip = "rehearsal" if options.rehearse else found.get("device", options.device)
    now = datetime.now(UTC)
    name = f"check-{re.sub('[^a-z0-9]+', '-', str(chip).lower()).strip('-')}-{now:%Y-%m-%d}"
    folder.mkdir(parents=True, exist_ok=True)
    markdown, figures = folder / f"{name}.md", folder / f"{name}.json"
    lines = [f"# Check of {chip}, {now:%Y-%m-%d %H:%M} UTC", ""]
    if options.rehearse:
        lines += ["A rehearsal on a CPU, with interpreted kernels and tiny shapes: no figure here is a chip's.", ""]
    lines += [f"Seed {options.seed}; models {', '.join(options.models)}.", ""]
    lines += ["| part | | seconds |", "|---|---|---|"]
    for part in PARTS:
        result = results.get(part)
        state = "not run" if result is None else WORDS[result.status]
        lines.append(f"| {TITLES[part]} | {state} | {0 if result is None else result.seconds:.0f} |")
    for part, result in results.items():
        lines += ["", f"## {TITLES[part]}: {WORDS[result.status]}", ""]
        lines += [f"- **{problem}**" for problem in result.problems]
        lines += [""] * bool(result.problems) + result.lines
    markdown.write_text("\n".join(lines) + "\n")
    content = {
        "date": now.isoformat(timespec="seconds"),
        "options": dataclasses.asdict(options),
        "parts": {part: dataclasses.asdict(result) for part, result in results.items()},
    }
    figures.write_text(json.dumps(content, indent=1) + "\n")
    return markdown, figures
