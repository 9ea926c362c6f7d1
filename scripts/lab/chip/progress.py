"""Runs the parts, each in a process of its own with a time limit, keeps their results in a folder, and writes the
report: Markdown for people, JSON with all figures.

This process does not import JAX. A part that crashes or hangs on the device does not stop the next part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from model.inputs.words import described
from scripts.building.child import how_it_ended
from scripts.lab.chip.parts import PARTS, ROOT, WORDS, Options, Result
from scripts.lab.tables import Table, command

# In a rehearsal the GPU kernels' interpreter needs threads, of which XLA's CPU client has as many as devices.
DEVICES = "--xla_force_host_platform_device_count"
REHEARSAL_PATIENCE = 3  # a busy CPU is no finding
TAIL_LINES = 12


class Progress:
    """The results of the parts, in `folder`, with the logs of those that have run.

    Args:
        earlier: the report of figures that this check goes on with (`write_report`); None: it begins anew.

    Raises:
        ValueError: that report is of another device or of other models, or is none.
    """

    def __init__(self, folder: Path, options: Options, earlier: Path | None = None) -> None:
        results = {} if earlier is None else _read_report(earlier, options)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.resolve()
        self._options = options
        for part in PARTS:
            self._path(part).unlink(missing_ok=True)
            if part in results:
                results[part].write(self._path(part))

    def run(
        self, parts: Iterable[str], report: Callable[[dict[str, Result]], object] = lambda results: None
    ) -> dict[str, Result]:
        """Runs those of `parts` that have no result, and returns the results of all parts that have one. `report` gets
        them after each part."""
        deadline = time.monotonic() + self._options.limit_s
        for part in parts:
            if self._path(part).exists() and not Result.read(self._path(part)).is_bad:
                continue
            own_limit_s = PARTS[part].limit_s * (REHEARSAL_PATIENCE if self._options.rehearse else 1)
            limit_s = min(own_limit_s, deadline - time.monotonic())
            if limit_s > 0:
                print(f"{part}: running, for at most {limit_s:.0f} s", flush=True)
                result = self._run_part(part, limit_s)
            else:
                result = Result(status="late", problems=["there was no time left for it"])
                if self._path(part).exists():  # the figures of the run that this one goes on with
                    continue
            result.write(self._path(part))
            print(f"{part}: {result.status} after {result.seconds:.0f} s", flush=True)
            report(self._results())
        return self._results()

    def _results(self) -> dict[str, Result]:
        return {part: Result.read(self._path(part)) for part in PARTS if self._path(part).exists()}

    def _run_part(self, part: str, limit_s: float) -> Result:
        path, log = self._path(part), self._folder / f"{part}.log"
        command = [sys.executable, "-m", "scripts.lab.chip", part, self._options.to_json(), str(path)]
        env = dict(os.environ)
        if self._options.rehearse:
            env["JAX_PLATFORMS"] = "cpu"
            if DEVICES not in (flags := env.get("XLA_FLAGS", "")):
                env["XLA_FLAGS"] = f"{flags} {DEVICES}=8"
        started = time.monotonic()
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(limit_s)
                result = Result.read(path) if path.exists() else Result(status="late")
                if result.status == "late":  # it has stored its last line, but not its end
                    result.status = "failed"
                    result.problems.append(how_it_ended(code))
            except subprocess.TimeoutExpired:
                result = Result.read(path) if path.exists() else Result()
                result.status = "late"
                result.problems.append(f"it was stopped after {limit_s:.0f} s")
            finally:
                _end_group(process)
        result.seconds = time.monotonic() - started
        if result.status in ("failed", "late"):
            tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            result.lines += ["The end of its log:", "", *(f"    {line}" for line in tail)]
        return result

    def _path(self, part: str) -> Path:
        return self._folder / f"{part}.json"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the part: it may have started servers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_report(path: Path, options: Options) -> dict[str, Result]:
    """The results in a report of figures. Raises ValueError if they are of something else than the options."""
    try:
        content = json.loads(path.read_text())
        subject = [content["options"][name] for name in ("device", "rehearse", "models")]
        results = {part: Result(**fields) for part, fields in content["parts"].items() if part in PARTS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--resume {path}: no report of scripts/check ({described(error)})") from error
    wanted = [options.device, options.rehearse, list(options.models)]
    if subject != wanted:
        raise ValueError(f"--resume {path}: its device, rehearsal and models are {subject}, and not {wanted}")
    return results


def unknown(results: Mapping[str, Result]) -> list[str]:
    """What no part has found yet, a line for each part."""
    found = []
    for part, (title, *_) in PARTS.items():
        result = results.get(part)
        if result is None or (result.status in ("failed", "late") and not result.unknown):
            found.append(f"{title} (`{part}`)")
        elif result.unknown:
            found.append(f"{title} (`{part}`): {'; '.join(result.unknown)}")
    return found


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
    lines += [f"`{command()}`; seed {options.seed}; models {', '.join(options.models)}.", ""]
    table = Table({"part": "", "": "", "seconds": ".0f"})
    for part, (title, *_) in PARTS.items():
        result = results.get(part)
        table.row(title, WORDS[result.status] if result else "not run", result.seconds if result else 0)
    lines += table.lines
    if left := unknown(results):
        lines += ["", "Still unknown:", "", *(f"- {line}" for line in left)]
    for part, result in results.items():
        lines += ["", f"## {PARTS[part].title}: {WORDS[result.status]}", ""]
        lines += [f"- **{problem}**" for problem in result.problems]
        lines += [""] * bool(result.problems) + result.lines
    markdown.write_text("\n".join(lines) + "\n")
    content: dict[str, Any] = {
        "command": command(),
        "date": now.isoformat(timespec="seconds"),
        "options": dataclasses.asdict(options),
        "parts": {part: result.content() for part, result in results.items()},
    }
    figures.write_text(json.dumps(content, indent=1) + "\n")
    return markdown, figures
