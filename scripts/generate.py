"""Offline generation: answers every line of a file in this process. An interrupted run can be continued.

    python -m scripts.generate --model demo --input prompts.jsonl --output out.jsonl

Lines are OpenAI batch requests or plain prompts (`server/batches/batch_file.py`). The output has one record per line,
in the order of the input. Until the output is complete, OUTPUT.partial holds the finished records; the same command
continues from there, and a run over another input is refused. An existing output is replaced only with --overwrite, and
only when the new one is complete. Input and output may be in a bucket.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from tqdm import tqdm

from batcher.errors import EngineDeadError
from model.inputs.json_file import json_argument
from model.inputs.paths import Place, place_argument
from model.inputs.remote import RemotePath
from model.inputs.words import report_lines
from scripts.building.device import users_cache_folder
from scripts.flags.errors import FailedError, add_debug_flag, failed
from scripts.flags.parsing import parse_flags
from scripts.flags.settings import EngineSettings, add_engine_flags
from scripts.llm import LLM
from scripts.offline.journal import Header, Journal
from scripts.offline.output import Output
from server.batches.batch_file import (
    Line,
    answer_record,
    digest,
    input_digest,
    num_output_tokens,
    numbered_lines,
    parse_line,
    problem_record,
)
from server.flag import flag_name
from server.http.encoding import encode_json

STDIN = Path("-")
Key = tuple[int, str]  # a line's number and its digest
# Settings that change answers. A run continues a journal only if they are the same. Other settings change the speed.
ANSWERING = ("model", "load_format", "dtype", "quantization", "kv_cache_dtype", "calculate_kv_scales", "seed")


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        prog="python -m scripts.generate", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--input", type=place_argument, required=True, metavar="FILE", help="JSON lines; -: standard input")
    p.add_argument("--output", type=place_argument, required=True, metavar="FILE")
    p.add_argument("--overwrite", action="store_true", help="redo an output that is there, and drop a partial one")
    p.add_argument(
        "--params", type=json_argument, default={}, metavar="JSON",
        help='fields for lines that generate and do not set them, such as \'{"max_tokens": 128, "temperature": 0}\'',
    )  # fmt: skip
    p.add_argument("--tokenizer", type=place_argument, metavar="DIR", help="default: the model's own")
    p.add_argument("--served-model-name", metavar="NAME", help="what the lines call the model (default: --model)")
    add_engine_flags(p)
    add_debug_flag(p)
    return p


def generate(
    batch: BatchInput,
    keys: Sequence[Key],
    output: Output,
    journal: Journal,
    params: dict[str, Any],
    load: Callable[[], LLM],
) -> int:
    """Answers the lines that the journal lacks, writes the output, and returns the number of error records.

    Args:
        keys: the keys of the lines of `batch`.
        load: makes the LLM. It is not called if no line is left.
    """
    bar = tqdm(total=len(keys), initial=sum(number in journal for number, _ in keys), unit="line", smoothing=0.05)
    asked: dict[int, tuple[int, Line]] = {}
    num_tokens = 0

    def requests() -> Iterator[tuple[str, Any]]:
        """The requests of the remaining lines. A line that is not a request gets its error record here."""
        seen: set[str] = set()
        lines = batch.numbered_lines()
        for key in keys:  # lines that were added later are ignored
            number, text = next(lines, (0, ""))
            if key != (number, digest(text)):
                raise ValueError(f"line {key[0]} of the input has changed since the run began")
            line = parse_line(text, number, params)
            if line.custom_id is not None and line.custom_id in seen and line.problem is None:
                problem = f"line {number}: custom_id {line.custom_id!r} is taken by a line before"
                line = Line(custom_id=line.custom_id, problem=problem)
            seen.add(line.custom_id or "")
            if number in journal:
                continue
            if line.problem is not None:
                journal.add(number, problem_record(line))
                bar.update()
                continue
            asked[len(asked)] = (number, line)
            yield line.url, line.body

    def on_answer(index: int, status: int, answer: dict[str, Any]) -> None:
        nonlocal num_tokens
        number, line = asked[index]
        asked[index] = (number, Line(custom_id=None))  # drops the body, which is no longer needed
        journal.add(number, answer_record(line, status, encode_json(answer)))
        num_tokens += num_output_tokens(answer)
        bar.set_postfix_str(f"{num_tokens} tokens out", refresh=False)
        bar.update()

    with bar:
        if not _is_complete(journal, keys):
            with load() as llm:
                llm.post_all(requests(), on_answer)
    try:
        num_errors = journal.write_to(output.ordered, (number for number, _ in keys))
        output.publish(journal.header.replaces)
    finally:
        output.ordered.unlink(missing_ok=True)
    journal.finish()
    return num_errors


def begin(journal: Journal, output: Output, run: Header, keys: Sequence[Key], *, overwrite: bool) -> bool:
    """Prepares the journal to continue an interrupted run or to begin a new one. Returns whether there is work to do.

    Raises:
        ValueError: the journal belongs to another run, or an output exists that this run must not replace.
    """
    if journal.is_empty:
        if run.replaces is not None and not overwrite:
            print(f"{output.place} is there already: nothing to do (--overwrite does it again)", file=sys.stderr)
            return False
        if output.ordered.exists():  # no interrupted run has left it there
            raise ValueError(f"{output.ordered} is in the way: move it, or name another --output")
    elif not overwrite:
        journal.check_belongs_to(run)
        if not _is_complete(journal, keys):  # else it may be the output that this run has just written
            output.check_may_go_on(journal.header.replaces)
        return True
    journal.begin(run)
    return True


def _is_complete(journal: Journal, keys: Sequence[Key]) -> bool:
    return all(number in journal for number, _ in keys)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parse_flags(parser(), argv)
    partial: Path | None = None
    try:
        settings = EngineSettings.from_namespace(args)
        if not isinstance(args.params, dict):
            raise ValueError(f"--params must be a JSON object, not {args.params!r}")
        if isinstance(args.input, RemotePath) and args.output == args.input:
            raise ValueError(f"--input {args.input} is the file that this run would write: name another")
        output = Output(args.output, users_cache_folder() / "batches")
        partial = output.partial

        def load() -> LLM:
            keywords = dataclasses.asdict(settings)
            keywords |= {"tokenizer": args.tokenizer, "served_model_name": args.served_model_name}
            keywords["trust_request_chat_template"] = False
            return LLM(report=lambda line: tqdm.write(report_lines(line), file=sys.stderr), **keywords)

        answering = {flag_name(EngineSettings, name): getattr(settings, name) for name in ANSWERING} | {
            "--params": args.params,
            "--pooling-type": settings.pooling and settings.pooling.value,
            "--tokenizer": args.tokenizer and str(args.tokenizer),
            "--served-model-name": args.served_model_name,
        }
        if settings.has_models:
            answering |= {
                "--models": list(map(str, settings.named_models)),
                "--models-folder": str(settings.models_folder),
            }
        if settings.revision is not None:
            answering["--revision"] = settings.revision
        if settings.enable_lora:
            answering |= {
                "--lora-modules": list(map(str, settings.adapters)),
                "--lora-folder": str(settings.lora_folder),
            }
        with BatchInput(args.input) as batch:
            batch.check_is_none_of(output.local_files())
            keys = [(number, digest(text)) for number, text in batch.numbered_lines()]
            if not keys:
                raise ValueError(f"--input {args.input} has no lines")
            with Journal(partial) as journal:
                run = Header(input=input_digest(keys), settings=answering, replaces=output.version())
                if not begin(journal, output, run, keys, overwrite=args.overwrite):
                    return 0
                num_errors = generate(batch, keys, output, journal, args.params, load)
    except BlockingIOError:
        return failed("generate", ValueError(f"another run is writing {partial}"), debug=False)
    except EngineDeadError as error:
        return failed("generate", FailedError(f"{error}; what is finished is in {partial}"), debug=False)
    except KeyboardInterrupt:
        command = "the same command without --overwrite" if args.overwrite else "the same command"
        kept = f"; {command} goes on from {partial}" if partial is not None and partial.exists() else ""
        print(f"generate: interrupted{kept}", file=sys.stderr)
        return 130
    except Exception as error:
        return failed("generate", error, debug=args.debug)
    if num_errors:
        print(f"{num_errors} of the records are errors", file=sys.stderr)
    return 0


class BatchInput:
    """The lines of a batch file. They can be read several times.

    The content of a pipe is copied to a temporary file. Opening such an input waits until the pipe's writer ends.

    Args:
        path: "-" is the standard input. A file in a bucket is copied to a temporary file.

    Raises:
        ValueError: `path` is a folder.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Place) -> None:
        if path != STDIN and path.is_dir():
            raise ValueError(f"--input {path} is a folder: name a file of JSON lines")
        self._path = path
        self._file = _opened(path)
        self._start = self._file.tell()  # the shell may have read a part of the standard input

    def check_is_none_of(self, paths: Iterable[Path]) -> None:
        """Raises ValueError if one of the output `paths` is this file, directly or through links."""
        own = os.fstat(self._file.fileno())
        for path in paths:
            if path.exists() and os.path.samestat(own, path.stat()):
                raise ValueError(f"--input {self._path} is the file {path}, which this run would write: name another")

    def numbered_lines(self) -> Iterator[tuple[int, str]]:
        """The lines that are not blank, with their numbers from 1."""
        self._file.seek(self._start)
        return numbered_lines(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def _opened(path: Place) -> BinaryIO:
    """The file, or a copy of it if it is not one of this machine that can be read again."""
    if isinstance(path, RemotePath):
        with tempfile.TemporaryDirectory(prefix="pallas-serve-") as folder:
            path.copy_to(Path(folder) / "input")
            return (Path(folder) / "input").open("rb")  # readable to its end without a name
    file: BinaryIO = open(0, "rb", closefd=False) if path == STDIN else path.open("rb")  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    with file:
        os.set_blocking(file.fileno(), True)  # another program may have left a shared terminal non-blocking
        copy = tempfile.TemporaryFile("w+b", prefix="pallas-serve-")  # noqa: SIM115
        try:
            shutil.copyfileobj(file, copy)
            copy.seek(0)
        except BaseException:
            copy.close()
            raise
    return copy


if __name__ == "__main__":
    sys.exit(main())
