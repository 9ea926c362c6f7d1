"""Trains the demo checkpoint: `python -m scripts.train_demo --output model/demo`.

Everything it reads it writes itself (scripts/demo); it needs two cores, 4 GiB and well under an hour. An interrupted
run goes on where it was when it is given the same --work-dir.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator

import jax
from tokenizers import Tokenizer

from model.config import LlamaConfig
from model.inputs.paths import local_path
from scripts.demo import evaluate, export
from scripts.demo import tokenizer as llama_tokenizer
from scripts.demo.arithmetic import Arithmetic
from scripts.demo.corpus import Corpus, Document
from scripts.demo.tokenizer import SampleEncoder
from scripts.demo.trainer import Schedule, Shape, Trainer

VOCAB_SIZE = 1536
MAX_LENGTH = 1024
TOKENIZER_SAMPLES = 20_000
PROMPT_WEIGHT = 0.05  # of predicting the user's words: they are hardly predictable, and not wanted
REPORT_EVERY = 50
SAVE_EVERY = 200
SHAPES = (  # 4,096 tokens each
    Shape(row_length=128, num_rows=32, share=0.52, kind="short"),
    Shape(row_length=256, num_rows=16, share=0.37, kind="long"),
    Shape(row_length=512, num_rows=8, share=0.08, kind="long"),
    Shape(row_length=1024, num_rows=4, share=0.03, kind="endless"),
)
SHOWN_PROMPTS = ("What is 47 + 35?", "Hello", "Tell me a story about a fox.", "Count from 4 to 9.", "Explain gravity.")
SHOWN_TEXT = "Once upon a time"


def demo_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Heads of 64 so that the chips' kernels can run it; everything else as small as will do."""
    vocabulary = tokenizer.get_vocab()
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        checkpoint_dtype="bfloat16",
        bos_token_id=vocabulary[llama_tokenizer.BEGIN_OF_TEXT],
        eos_token_ids=tuple(
            vocabulary[token]
            for token in (llama_tokenizer.END_OF_TEXT, llama_tokenizer.END_OF_MESSAGE, llama_tokenizer.END_OF_TURN)
        ),
    )


def tokenizer_texts(corpus: Corpus, seed: int) -> Iterator[str]:
    """The texts that the tokenizer is trained on. Equal seeds give equal texts."""
    rng = random.Random(f"{seed}/tokenizer")
    for i in range(TOKENIZER_SAMPLES):
        sample = corpus.long(rng) if i % 2 else corpus.short(rng)
        if isinstance(sample, Document):
            yield sample.text
        else:
            yield from (text for turn in sample.turns for text in turn)
            yield sample.system or "system user assistant"


def parse_arguments() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=local_path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--work-dir", type=local_path, required=True, help="where the run's state is kept between reports"
    )
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop-after", type=int, help="export as it is after this many steps of the schedule")
    return parser.parse_args()


def main() -> None:
    """The command. An interrupted run goes on from its working folder."""
    arguments = parse_arguments()
    jax.config.update("jax_platforms", "cpu")
    started = time.perf_counter()
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(Arithmetic(), sum_share=0.34, story_share=0.3)
    tokenizer = llama_tokenizer.train(tokenizer_texts(corpus, arguments.seed), VOCAB_SIZE)
    encoder = SampleEncoder(tokenizer, prompt_weight=PROMPT_WEIGHT)
    schedule = Schedule(
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        warmup=50,
        seed=arguments.seed,
        shapes=SHAPES,
    )
    trainer = Trainer(demo_config(tokenizer), schedule)
    state_path = arguments.work_dir / "state.npz"
    seconds_before = 0.0
    if state_path.exists():
        trainer.restore(state_path)
        seconds_before = json.loads((arguments.work_dir / "seconds.json").read_text())
        say(f"goes on from step {trainer.step}", seconds_before)
    say(f"{sum(p.size for p in trainer.params.values()):,} parameters", seconds_before)

    def seconds() -> float:
        return seconds_before + time.perf_counter() - started

    def report(trainer: Trainer, line: str) -> None:
        say(line, seconds())
        if trainer.step % SAVE_EVERY == 0:
            trainer.save(state_path)
            (arguments.work_dir / "seconds.json").write_text(json.dumps(seconds()))
            say(", ".join(f"{name} {score:.3f}" for name, score in scores(trainer, encoder).items()), seconds())

    trainer.run(corpus, encoder, report_every=REPORT_EVERY, report=report, stop_after=arguments.stop_after)
    export.export(arguments.output, trainer.model(trainer.params), tokenizer)
    result = {
        "seed": arguments.seed,
        "steps": trainer.step,
        "tokens": trainer.step * SHAPES[0].num_rows * SHAPES[0].row_length,
        "training_minutes": round(seconds() / 60, 1),
        "parameters": sum(p.size for p in trainer.params.values()),
        "exact": {name: round(score, 4) for name, score in scores(trainer, encoder).items()},
    }
    (arguments.output / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    say(json.dumps(result), seconds())
    show(trainer, encoder)


def scores(trainer: Trainer, encoder: SampleEncoder) -> dict[str, float]:
    """Share of exact answers of each suite, with the weights as the checkpoint holds them."""
    model = trainer.model(export.rounded(trainer.params))
    results = {name: evaluate.exact(model, encoder, cases) for name, cases in evaluate.suites().items()}
    return {name: sum(right) / len(right) for name, right in results.items()}


def show(trainer: Trainer, encoder: SampleEncoder) -> None:
    """Prints what the model answers to SHOWN_PROMPTS."""
    model = trainer.model(export.rounded(trainer.params))
    prompts = [encoder.prompt(None, (), question) for question in SHOWN_PROMPTS]
    prompts.append([trainer.config.bos_token_id or 0, *encoder.text(SHOWN_TEXT)])
    answers = evaluate.generate(model, encoder, prompts, max_tokens=200)
    for question, answer in zip((*SHOWN_PROMPTS, SHOWN_TEXT), answers, strict=True):
        print(f"> {question}\n{encoder.tokenizer.decode(answer)}", flush=True)


def say(line: str, seconds: float) -> None:
    """Prints a line with the seconds since the start."""
    print(f"{seconds:7.0f} s  {line}", flush=True)


if __name__ == "__main__":
    main()
