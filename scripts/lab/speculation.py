"""Output tokens per second with and without drafts, at several numbers of streams, in this process and without HTTP.

    python -m scripts.lab speculation --device cpu --max-model-len 512
    python -m scripts.lab speculation --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'
    python -m scripts.lab speculation --speculative-config '{"method": "draft_model", "num_speculative_tokens": 3}'
    python -m scripts.lab speculation --model preset:llama-3.2-1b --agreement 0.7

Two runners, one of them with drafts, serve the same greedy requests in turns, and the best run of each counts. Two of
the texts repeat themselves, as edits and quotes do (a list that is written again, JSON records); the third is a story,
which does not. With `--agreement`, a model of the given shape and a draft model have made-up weights that agree so
often, and the text is what the model makes of a few tokens: the gain at a known acceptance, for shapes without weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from batcher.engine import Engine
from batcher.request import Request, SamplingParams
from model.inputs.paths import local_path
from model.loading.source import resolve
from scripts.building.runner import Built, build_runner
from scripts.building.stand_in_tokenizer import tokenizer_folder
from scripts.flags.errors import add_debug_flag, run_command
from scripts.flags.parsing import parse_flags
from scripts.flags.settings import EngineSettings, add_engine_flags
from scripts.lab.agreeing_pair import write_pair
from scripts.lab.serve_all import serve_all
from scripts.lab.tables import Table, say, say_head
from server.engine.scratch_folder import ScratchFolder
from server.flag import EachCounts
from server.text.tokenizer import ByteLevelTokenizer

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
LIST = "".join(f"{i}. {word}\n" for i, word in enumerate("apples pears plums cherries nuts bread cheese".split(), 1))
RECORDS = "".join(
    json.dumps({"text": f"{a} + {b} = {a + b}.", "answer": a + b}) + "\n" for a, b in ((47, 35), (12, 60))
)
TEXTS = {"list": 3 * LIST, "json": 3 * RECORDS, "story": "Once upon a time"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One text at one number of streams, with or without drafts."""

    text: str
    streams: int
    has_drafts: bool
    tokens_per_s: float
    tokens_per_step: float  # of one row, by the steps that decode
    acceptance: float  # share of the proposed drafts


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        prog="python -m scripts.lab speculation", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    work = p.add_argument_group("requests")
    work.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16, 64])
    work.add_argument("--output-len", type=int, default=160, metavar="N", help="tokens of every request")
    work.add_argument("--texts", nargs="+", action=EachCounts, choices=TEXTS, default=list(TEXTS))
    work.add_argument(
        "--agreement",
        type=float,
        metavar="SHARE",
        help="how often the draft model's next token is the model's; both have made-up weights, in --model's shape",
    )
    work.add_argument("--repeats", type=int, default=3, help="of each; the best counts")
    work.add_argument("--output-json", type=local_path)
    add_engine_flags(p)
    add_debug_flag(p)
    return p


def settings_with_drafts(args: argparse.Namespace) -> EngineSettings:
    """The settings of the runner that drafts: drafts are looked up unless the flags say otherwise. All programs are
    compiled before the first run: else a CPU would compile them, and take larger ones for them, while the runs are
    timed."""
    settings = replace(EngineSettings.from_namespace(args), compile_all_first=True)
    return settings if settings.speculation is not None else replace(settings, speculative_config=NGRAM)


def prompts(settings: EngineSettings, vocab_size: int, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The token ids of each text."""
    source = settings.source()
    with ScratchFolder() as spare:
        folder: Path = tokenizer_folder(None, source, spare.path)
        tokenizer = ByteLevelTokenizer.from_folder(folder, vocab_size=vocab_size)
    ids = tokenizer.encode_plain([TEXTS[name] for name in names])
    return {name: tuple(tokenizer.with_affixes(own)) for name, own in zip(names, ids, strict=True)}


def measure(engine: Engine, prompt: tuple[int, ...], streams: int, output_len: int) -> tuple[float, list[list[int]]]:
    """Seconds from the first token of the last stream to the end of all, and the tokens of each stream. Streams differ
    by the first token of their prompts, so that they do not write the same text."""
    sampling = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    requests = [
        Request(request_id=str(i), prompt=(prompt[i % len(prompt)], *prompt), sampling=sampling) for i in range(streams)
    ]
    served = serve_all(engine, requests)
    return served.ended_s - served.all_begun_s, served.tokens


def run(built: Built, name: str, prompt: tuple[int, ...], streams: int, output_len: int) -> tuple[Run, list[list[int]]]:
    """Serves one text once."""
    engine = built.engine()
    seconds, outputs = measure(engine, prompt, streams, output_len)
    stats = engine.stats()
    counts = stats.speculation
    made = sum(map(len, outputs)) - streams
    drawing_rows = made - counts.num_accepted_tokens
    return Run(
        text=name,
        streams=streams,
        has_drafts=built.plan.settings.speculation is not None,
        tokens_per_s=made / seconds,
        tokens_per_step=made / drawing_rows,
        acceptance=counts.num_accepted_tokens / max(counts.num_draft_tokens, 1),
    ), outputs


def bench(args: argparse.Namespace) -> int:
    """Runs all texts at all numbers of streams, prints a table, and returns the exit code."""
    settings = settings_with_drafts(args)
    if args.agreement is None:
        return compare(args, settings, None)
    with ScratchFolder() as scratch:
        pair = write_pair(scratch.path, resolve(settings.model, weights=False).config, args.agreement)
        asked = settings.speculation
        assert asked is not None
        drafts = {
            "method": "draft_model",
            "model": str(pair.draft),
            "num_speculative_tokens": asked.num_speculative_tokens,
        }
        settings = replace(settings, model=str(pair.model), speculative_config=json.dumps(drafts))
        return compare(args, settings, {"walk": pair.walk})


def compare(args: argparse.Namespace, with_drafts: EngineSettings, texts: dict[str, tuple[int, ...]] | None) -> int:
    """Prints the table of these prompts, or of `args.texts`."""
    import jax

    both = [build_runner(settings, print) for settings in (replace(with_drafts, speculative_config=None), with_drafts)]
    for built in both:
        built.engine().warm_up(lambda line: print(f"  {line}", flush=True))
    results: list[Run] = []
    say_head(jax.devices()[0].device_kind)
    rates = {"tokens/s": "8.0f", "with drafts": "8.0f", "ratio": "5.2f", "accepted": ".0%", "tokens a step": ".2f"}
    table = Table({"text": "<5", "streams": "7", **rates, "same text": ""}, say)
    texts = texts or prompts(with_drafts, both[0].info.vocab_size, args.texts)
    for name, prompt in texts.items():
        for streams in args.streams:
            best: list[Run | None] = [None, None]
            written: list[list[list[int]]] = [[], []]
            for _ in range(args.repeats):
                for i, built in enumerate(both):
                    found, written[i] = run(built, name, prompt, streams, args.output_len)
                    known = best[i]
                    best[i] = found if known is None or found.tokens_per_s > known.tokens_per_s else known
            plain, drafted = best
            assert plain is not None and drafted is not None
            results += [plain, drafted]
            same = sum(a == b for a, b in zip(*written, strict=True))
            speeds = plain.tokens_per_s, drafted.tokens_per_s, drafted.tokens_per_s / plain.tokens_per_s
            table.row(name, streams, *speeds, drafted.acceptance, drafted.tokens_per_step, f"{same} of {streams}")
    if args.output_json:
        args.output_json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parse_flags(parser(), argv)
    return run_command("speculation", lambda: bench(args), debug=args.debug)
