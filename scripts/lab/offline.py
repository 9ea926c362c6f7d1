"""Output tokens per second of the engine in this process, without HTTP.

    python -m scripts.lab offline --num-prompts 256 --max-num-seqs 64 --output-len lognormal:48:1.1:16:512

serves requests that are all there at the start.

    python -m scripts.lab offline --num-prompts 64 --output-len 200 --temperature 1 --compare grammar

serves them also under a grammar: a JSON array of strings that is longer than any output.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from batcher.engine import Engine
from batcher.request import Request, SamplingParams
from model.inputs.paths import local_path
from scripts.building.runner import Built, build_runner
from scripts.building.stand_in_tokenizer import tokenizer_folder
from scripts.flags.errors import add_debug_flag, run_command
from scripts.flags.parsing import parse_flags
from scripts.flags.settings import EngineSettings, add_engine_flags
from scripts.lab.load.lengths import Lengths
from scripts.lab.load.workload import random_ids
from scripts.lab.serve_all import serve_all
from scripts.lab.tables import Table, say, say_head
from server.engine.scratch_folder import ScratchFolder
from server.grammar.forms import json_schema_grammar
from server.grammar.matcher import TokenGrammars, vocabulary_of
from server.text.tokenizer import ByteLevelTokenizer

PLAIN = "continuous"  # the requests as they are
GRAMMAR = "grammar"  # every request under a grammar
ENDLESS = {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1000}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The figures of one way of serving the requests."""

    scheduling: str  # `PLAIN` or `GRAMMAR`
    seconds: float
    prompt_tokens: int
    output_tokens: int
    num_steps: int
    num_preemptions: int
    row_waste: float  # share of the steps' rows that are padding
    token_waste: float  # the same share of the tokens in the steps' shapes
    compiles_after_warm_up: int

    @property
    def output_tokens_per_s(self) -> float:
        """Mean over the whole run."""
        return self.output_tokens / self.seconds


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        prog="python -m scripts.lab offline", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    work = p.add_argument_group("requests")
    work.add_argument("--num-prompts", type=int, default=256)
    work.add_argument("--input-len", type=Lengths.parse, default=Lengths.parse("uniform:16:64"), metavar="LENGTHS")
    work.add_argument(
        "--output-len", type=Lengths.parse, default=Lengths.parse("lognormal:48:1.1:16:512"), metavar="LENGTHS",
        help="N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:LOW:HIGH, in tokens",
    )  # fmt: skip
    work.add_argument("--temperature", type=float, default=0.0)
    work.add_argument("--compare", choices=(GRAMMAR,), help="run this way too, on the same requests: see above")
    work.add_argument("--repeats", type=int, default=1, help="of each, alternating; the best of each is compared")
    work.add_argument("--output-json", type=local_path)
    add_engine_flags(p)
    add_debug_flag(p)
    return p


def make_requests(args: argparse.Namespace, *, vocab_size: int, max_model_len: int, seed: int) -> list[Request]:
    """Random prompts with outputs of exactly the drawn lengths. Raises ValueError if one does not fit the context."""
    random = np.random.default_rng(seed)
    input_lens = args.input_len.draw(args.num_prompts, random)
    output_lens = args.output_len.draw(args.num_prompts, random)
    longest = int((input_lens + output_lens).max())
    if longest > max_model_len:
        raise ValueError(f"the longest request has {longest} tokens, the context {max_model_len}: change the lengths")
    prompts = random_ids(input_lens, vocab_size=vocab_size, shared_prefix=0, random=random)
    return [
        Request(
            request_id=f"r{i}",
            prompt=tuple(prompt),
            sampling=SamplingParams(max_tokens=int(n), temperature=args.temperature, ignore_eos=True, seed=i),
        )
        for i, (prompt, n) in enumerate(zip(prompts, output_lens, strict=True))
    ]


def measure(engine: Engine, requests: Sequence[Request], scheduling: str) -> tuple[Run, dict[str, tuple[int, ...]]]:
    """Submits all requests at once, and measures until the last token. Also returns the tokens of each request.

    Raises:
        FailedError: a request ended with an error.
    """
    served = serve_all(engine, requests)
    stats = engine.stats()
    run = Run(
        scheduling=scheduling,
        seconds=served.ended_s - served.started_s,
        prompt_tokens=stats.prompt_tokens,
        output_tokens=sum(map(len, served.tokens)),
        num_steps=stats.num_steps,
        num_preemptions=stats.num_preemptions,
        row_waste=1 - stats.step_rows / stats.step_rows_padded,
        token_waste=1 - stats.step_tokens / stats.step_tokens_padded,
        compiles_after_warm_up=stats.num_compiles_after_warm_up,
    )
    return run, {r.request_id: tuple(ids) for r, ids in zip(requests, served.tokens, strict=True)}


def under_a_grammar(requests: Sequence[Request]) -> list[Request]:
    """The same requests under a grammar of an array that is longer than any output."""
    grammar = json_schema_grammar(ENDLESS)
    return [replace(request, sampling=replace(request.sampling, grammar=grammar)) for request in requests]


def grammars_of(built: Built) -> TokenGrammars:
    """Grammars over the tokens of the model's tokenizer, or of a stand-in."""
    source = built.plan.settings.source()
    with ScratchFolder() as spare:
        size = built.info.vocab_size
        tokenizer = ByteLevelTokenizer.from_folder(tokenizer_folder(None, source, spare.path), vocab_size=size)
    return TokenGrammars(lambda: vocabulary_of(tokenizer, vocab_size=size, end_ids=built.plan.weights.eos_token_ids))


def best_of_each(built: Built, requests: Sequence[Request], ways: Sequence[str], repeats: int) -> dict[str, Run]:
    """The best run of each way."""
    best: dict[str, Run] = {}
    grammars = grammars_of(built) if GRAMMAR in ways else None
    if grammars is not None:
        grammars.load()
    figures = {"output tokens/s": "9.1f", "s": "7.2f", "steps": "6", "rows wasted": "6.1%", "tokens wasted": "6.1%"}
    table = Table({"": "<11", **figures}, say)
    for _ in range(repeats):
        for way in ways:
            if way == GRAMMAR:
                run, _ = measure(built.engine(grammars=grammars), under_a_grammar(requests), way)
            else:
                run, _ = measure(built.engine(), requests, way)
            table.row(way, run.output_tokens_per_s, run.seconds, run.num_steps, run.row_waste, run.token_waste)
            if way not in best or run.seconds < best[way].seconds:
                best[way] = run
    return best


def bench(args: argparse.Namespace) -> int:
    """Serves the requests in each way, prints the figures, and returns the exit code."""
    import jax

    args.max_queue = max(args.max_queue, args.num_prompts)
    settings = EngineSettings.from_namespace(args)
    built = build_runner(settings, print)
    seed = settings.seed or 0
    requests = make_requests(args, vocab_size=built.info.vocab_size, max_model_len=built.info.max_model_len, seed=seed)
    built.engine().warm_up(lambda line: print(f"  {line}"))
    ways = [PLAIN, *([args.compare] if args.compare else [])]
    say_head(jax.devices()[0].device_kind)
    lens = np.array([request.sampling.max_tokens for request in requests])
    print(
        f"{len(requests)} requests, outputs of {lens.mean():.0f} tokens on average "
        f"(median {np.median(lens):.0f}, {lens.min()} to {lens.max()})\n"
    )
    best = best_of_each(built, requests, ways, args.repeats)
    result: dict[str, Any] = {"runs": [{**asdict(r), "tokens_per_s": r.output_tokens_per_s} for r in best.values()]}
    if len(ways) == 2:
        ratio = best[ways[0]].output_tokens_per_s / best[ways[1]].output_tokens_per_s
        result["ratio"] = ratio
        print(f"{ways[0]} gives {ratio:.2f} times the tokens/s of {ways[1]}")
    if args.output_json:
        args.output_json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parse_flags(parser(), argv)
    return run_command("offline", lambda: bench(args), debug=args.debug)
