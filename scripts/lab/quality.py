"""What quantised weights and K/V cost in quality, measured on the embedded demo against its float32 weights.

python -m scripts.lab quality
"""

from __future__ import annotations

import argparse
from itertools import product

from model.quantization.forms import FORM_NAMES
from scripts.flags.errors import add_debug_flag, run_command
from scripts.lab.tables import Table, say, say_head
from server.flag import EachCounts

CPU_FORMS = ("int4-g32-f16", "int4-g32-q4_1")  # of GGUF files: Q4_0 and Q4_1


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.lab quality", description=__doc__.splitlines()[0])
    forms = (*FORM_NAMES, *CPU_FORMS)
    p.add_argument("--quantization", nargs="*", action=EachCounts, default=list(forms), choices=forms)
    p.add_argument("--no-kv", dest="kv", action="store_false", help="leave out K/V in int8, alone and with each")
    p.add_argument("--num-stories", type=int, help="of new text, for the divergence (default: 500)")
    add_debug_flag(p)
    return p


def bench(args: argparse.Namespace) -> int:
    """Prints one line for each form of the weights, with the inputs of projections as they are and rounded: for 8 bits
    to the same form, for 4 bits to int8 in blocks, as on CPUs; and another one for K/V in int8. Returns the exit code.
    """
    if args.num_stories is not None and args.num_stories < 1:
        raise ValueError(f"--num-stories {args.num_stories} is not 1 or more")
    import jax

    jax.config.update("jax_platforms", "cpu")
    from tokenizers import Tokenizer

    from model.config import LlamaConfig
    from model.loading.source import DEMO_FOLDER
    from model.loading.weights import load_hf
    from model.quantization.forms import EightBit, Rounding, WeightForm, form_named
    from scripts.lab.demo import evaluate
    from scripts.lab.demo.agreement import NUM_STORIES, agreement, with_narrow_kv
    from scripts.lab.demo.tokenizer import SampleEncoder

    config = LlamaConfig.from_file(DEMO_FOLDER)
    encoder = SampleEncoder(Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")), prompt_weight=0.0)
    exact = load_hf(DEMO_FOLDER, config, dtype="float32")
    suites = evaluate.suites()
    say_head()
    scores = {"KL, nats a token": "9.6f", "+-": "9.6f", "same top token": "7.4f", "sums": ">7", "comparisons": ">7"}
    table = Table({"weights": "<13", "inputs": "<9", "K/V": "<8", **scores}, say)
    weights: list[tuple[WeightForm | None, Rounding | None]] = [(None, None)]
    for named in (form_named(name, config.projection_inputs) for name in args.quantization):
        weights += [(named, None), (named, Rounding())]
    for (form, rounding), is_narrow in product(weights, (False, True) if args.kv else (False,)):
        model = load_hf(DEMO_FOLDER, config, dtype="float32", quantization=form, rounding=rounding)
        if is_narrow:
            model = with_narrow_kv(model)
        near = agreement(exact, model, encoder, args.num_stories or NUM_STORIES)
        right = [
            f"{sum(evaluate.exact(model, encoder, suites[name]))}/{len(suites[name])}"
            for name in ("held_out_sums", "held_out_comparisons")
        ]
        inputs = "float32" if rounding is None else str(form if isinstance(form, EightBit) else EightBit.INT8)
        stored = str(form or "float32"), inputs, "int8" if is_narrow else "float32"
        table.row(*stored, near.divergence, near.divergence_error, near.same_top_token, *right)
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return run_command("quality", lambda: bench(args), debug=args.debug)
