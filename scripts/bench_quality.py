"""What quantised weights cost in quality, measured on the embedded demo against its float32 weights.

python -m scripts.bench_quality
"""

from __future__ import annotations

import argparse
import sys

from scripts.wiring.errors import add_debug_flag, failed
from scripts.wiring.settings import QUANTIZATIONS


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.bench_quality", description=__doc__.splitlines()[0])
    p.add_argument("--quantization", nargs="*", default=list(QUANTIZATIONS), choices=QUANTIZATIONS)
    add_debug_flag(p)
    return p


def bench(forms: list[str]) -> None:
    """Prints one line for each form."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from tokenizers import Tokenizer

    from model.config import LlamaConfig
    from model.loading.source import DEMO_FOLDER
    from model.loading.weights import load_hf
    from model.quantization.forms import EightBit
    from scripts.demo import evaluate
    from scripts.demo.agreement import agreement
    from scripts.demo.tokenizer import SampleEncoder

    config = LlamaConfig.from_file(DEMO_FOLDER)
    encoder = SampleEncoder(Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")), prompt_weight=0.0)
    exact = load_hf(DEMO_FOLDER, config, dtype="float32")
    suites = evaluate.suites()
    print(f"{'weights':10}{'KL, nats a token':>18}{'same top token':>16}{'sums':>10}{'comparisons':>13}")
    for form in (None, *map(EightBit, forms)):
        model = load_hf(DEMO_FOLDER, config, dtype="float32", quantization=form)
        near = agreement(exact, model, encoder)
        right = [
            f"{sum(evaluate.exact(model, encoder, suites[name]))}/{len(suites[name])}"
            for name in ("held_out_sums", "held_out_comparisons")
        ]
        print(
            f"{form or 'float32':10}{near.divergence:18.6f}{near.same_top_token:16.4f}{right[0]:>10}{right[1]:>13}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    try:
        bench(args.quantization)
    except (Exception, KeyboardInterrupt) as error:
        return failed("bench_quality", error, debug=args.debug)
    return 0


if __name__ == "__main__":
    sys.exit(main())
