"""Starts servers from empty and from filled caches: seconds of each phase until ready, CPU seconds, peak memory.

    python -m scripts.lab startup
    python -m scripts.lab startup --kinds warm --starts 5 -- --model ~/ckpt/1b --dtype bfloat16
    python -m scripts.lab startup --target v6e:1x1 --model 8b --max-model-len 8192

`cold`: an empty --compile-cache. `warm`: a --compile-cache with all programs. The caches lie in a
temporary folder, and the starts that fill them are not counted. The phases are those that the server prints; some
overlap. CPU seconds and the peak of resident memory are those of all its processes when it is ready.

With `--target` no server is started. The programs of a start on these chips are compiled here, by the chips' own
compiler: CPU seconds of each, and the time until all are there. `--programs` compiles a few; the others of the table
then have the seconds of one of their kind.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

from model.inputs.paths import local_path
from scripts.flags.errors import FailedError, add_debug_flag, run_command
from scripts.lab import startup_account
from scripts.lab.load.servers import READY, launched
from scripts.lab.tables import Table, say, say_head
from server.flag import EachCounts

# Lines that the server prints at its start. Each phase is named by its line.
_PHASE = re.compile(r"^  (\w[\w -]*?) +(\d+\.\d) s ")
_PROGRAMS = re.compile(r"^  (compiled|ran) .*?programs (?:once )?in (\d+\.\d) s")
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Start:
    """What one start took until the server was ready."""

    phases: dict[str, float]  # seconds, in the order in which they ended
    ready: float  # seconds of wall time
    cpu: float  # seconds of all processes
    http_mib: float  # peak of resident memory, of the process that answers HTTP
    engine_mib: float  # the same of all others


KINDS = ("cold", "warm")


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        prog="python -m scripts.lab startup", description=__doc__.splitlines()[0], allow_abbrev=False,
        usage="%(prog)s [FLAG ...] -- [FLAG of scripts/serve ...]",
    )  # fmt: skip
    p.add_argument("--kinds", nargs="+", action=EachCounts, choices=KINDS, default=KINDS, help="default: all")
    p.add_argument("--starts", type=int, default=3, help="of each kind (default: 3)")
    p.add_argument("--output-json", type=local_path)
    startup_account.add_flags(p.add_argument_group("chips that are not here"))
    add_debug_flag(p)
    return p


def phase_of(line: str) -> tuple[str, float] | None:
    """Name and seconds of the phase that the line reports."""
    found = _PHASE.match(line) or _PROGRAMS.match(line)
    return None if found is None else (found[1], float(found[2]))


def start(flags: Sequence[str]) -> Start:
    """Starts a server, waits until it is ready, and stops it. Raises FailedError if it ends before."""
    phases: dict[str, float] = {}
    with launched(*flags) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if (phase := phase_of(line)) is not None:
                phases |= [phase]
            elif found := READY.match(line):
                http = psutil.Process(server.pid)
                others = http.children(recursive=True)
                cpu = sum(sum(process.cpu_times()[:2]) for process in (http, *others))
                return Start(phases, float(found[1]), cpu, _peak_mib(http), sum(map(_peak_mib, others)))
    raise FailedError(f"the server ended with code {server.returncode} before it was ready")


def _peak_mib(process: psutil.Process) -> float:
    """Linux's record of a process's largest resident memory."""
    found = _PEAK.search(Path(f"/proc/{process.pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def starts(kind: str, count: int, flags: Sequence[str], say: Callable[[str], None]) -> list[Start]:
    """`count` starts of one kind, each of which is reported. A kind with filled caches needs one start more."""
    results = []
    with tempfile.TemporaryDirectory() as shared:
        if kind != "cold":
            start(["--compile-cache", shared, "--compile-all-first", *flags])
        for _ in range(count):
            with tempfile.TemporaryDirectory() as own:
                result = start(["--compile-cache", own if kind == "cold" else shared, *flags])
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.phases.items())
            say(f"{kind}: ready after {result.ready:.1f} s, {result.cpu:.1f} CPU s ({phases})")
            results.append(result)
    return results


def table(results: dict[str, list[Start]]) -> str:
    """The medians of each kind."""
    names = list(dict.fromkeys(name for of_kind in results.values() for result in of_kind for name in result.phases))
    memory = {"HTTP MiB": "8.0f", "engine MiB": "8.0f"}
    table = Table({"median": "<8", **dict.fromkeys([*names, "ready s", "CPU s"], "6.1f"), **memory})
    for kind, of_kind in results.items():
        figures = [[r.phases.get(name, 0.0) for name in names] for r in of_kind]
        figures = [[*f, r.ready, r.cpu, r.http_mib, r.engine_mib] for f, r in zip(figures, of_kind, strict=True)]
        table.row(kind, *map(median, zip(*figures, strict=True)))
    return "\n".join(table.lines)


def bench(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Starts the servers with these flags, prints the table, and returns the exit code."""
    if args.starts < 1:
        raise ValueError(f"--starts {args.starts}: it is at least 1")
    results = {kind: starts(kind, args.starts, flags, say) for kind in args.kinds}
    say_head()
    print(table(results))
    if args.output_json:
        of_kinds = {kind: [asdict(result) for result in of_kind] for kind, of_kind in results.items()}
        args.output_json.write_text(json.dumps(of_kinds, indent=2) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    args, others = parser().parse_known_args(argv[:end])
    flags = [*others, *argv[end + 1 :]]
    if others and args.target is None:
        parser().error(f"unrecognized arguments: {' '.join(others)} (flags of scripts/serve come after --)")
    if args.target is not None:
        return run_command("startup", lambda: startup_account.account(args, flags), debug=args.debug)
    return run_command("startup", lambda: bench(args, flags), debug=args.debug)
