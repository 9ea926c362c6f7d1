"""Offline generation: answers every line of a file, in process, and can be interrupted and taken up again.

    python -m scripts.generate --model demo --input prompts.jsonl --output out.jsonl

Lines are OpenAI batch requests or plain prompts (scripts/batch_file.py). The output has one record per line, in the
input's order. Until it is complete, finished records gather in OUTPUT.partial; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from batcher.errors import EngineDeadError
from scripts.batch_file import Journal, Line, answer_record, digest, parse_line, problem_record
from scripts.llm import LLM
from scripts.settings import EngineSettings, add_engine_flags


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m scripts.generate", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--input", type=Path, required=True, metavar="FILE", help="JSON lines")
    p.add_argument("--output", type=Path, required=True, metavar="FILE")
    p.add_argument("--overwrite", action="store_true", help="redo an output that is there, and forget a partial one")
    p.add_argument(
        "--params", type=json.loads, default={}, metavar="JSON",
        help='fields for lines that do not set them, such as \'{"max_tokens": 128, "temperature": 0}\'',
    )  # fmt: skip
    p.add_argument("--tokenizer", type=Path, metavar="DIR", help="default: the model's own")
    p.add_argument("--served-model-name", metavar="NAME", help="what the lines call the model (default: --model)")
    add_engine_flags(p)
    return p


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    # A line that is not UTF-8 is that line's error: the others are read all the same.
    with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text.strip()


def generate(path: Path, output: Path, journal: Journal, params: dict[str, Any], salt: str, load: Any) -> int:
    """Answers what the journal lacks and writes the output; returns the number of errors in it.

    `load()` gives the LLM; it is not called where nothing is left to ask.
    """
    keys = [(number, digest(text, salt)) for number, text in numbered_lines(path)]
    bar = tqdm(total=len(keys), initial=sum(key in journal for key in keys), unit="line", smoothing=0.05)
    asked: dict[int, tuple[int, str, Line]] = {}
    num_tokens = 0

    def requests() -> Iterator[tuple[str, Any]]:
        """The lines still to be asked. Those that are no requests are answered on the way."""
        seen: set[str] = set()
        for (number, text), key in zip(numbered_lines(path), keys, strict=True):
            line = parse_line(text, number, params)
            if line.custom_id is not None and line.custom_id in seen and line.problem is None:
                problem = f"line {number}: custom_id {line.custom_id!r} is taken by a line before"
                line = Line(custom_id=line.custom_id, problem=problem)
            seen.add(line.custom_id or "")
            if key in journal:
                continue
            if line.problem is not None:
                journal.add(*key, problem_record(line))
                bar.update()
                continue
            asked[len(asked)] = (*key, line)
            yield line.url, line.body

    def on_answer(index: int, status: int, answer: dict[str, Any]) -> None:
        nonlocal num_tokens
        number, line_digest, line = asked[index]
        asked[index] = (number, line_digest, Line(custom_id=None))  # its body is not needed any more
        journal.add(number, line_digest, answer_record(line, status, answer))
        num_tokens += answer.get("usage", {}).get("completion_tokens", 0)
        bar.set_postfix_str(f"{num_tokens} tokens out", refresh=False)
        bar.update()

    with bar:
        if any(key not in journal for key in keys):
            with load() as llm:
                llm.post_all(requests(), on_answer)
    return journal.write_ordered(iter(keys), output)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    partial = args.output.with_name(args.output.name + ".partial")
    try:
        settings = EngineSettings.from_namespace(args)
        if not isinstance(args.params, dict):
            raise ValueError(f"--params must be a JSON object, not {args.params!r}")
        if args.overwrite:
            args.output.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)
        if args.output.exists() and not partial.exists():
            print(f"{args.output} is there already: nothing to do (--overwrite does it again)", file=sys.stderr)
            return 0

        def load() -> LLM:
            keywords = {name: getattr(settings, name) for name in EngineSettings.field_names()}
            return LLM(tokenizer=args.tokenizer, served_model_name=args.served_model_name, report=_say, **keywords)

        salt = json.dumps([settings.model, args.params], sort_keys=True)
        with Journal(partial) as journal:
            num_errors = generate(args.input, args.output, journal, args.params, salt, load)
    except BlockingIOError:
        print(f"generate: another run is writing {partial}", file=sys.stderr)
        return 2
    except EngineDeadError as error:
        print(f"generate: {error}; what is finished is in {partial}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"generate: interrupted; the same command goes on from {partial}", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    if num_errors:
        print(f"{num_errors} of the records are errors", file=sys.stderr)
    return 0


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
