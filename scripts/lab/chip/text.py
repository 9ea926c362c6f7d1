"""The demo's greedy text on this device, from a whole server over HTTP, against the text of a CPU: its own and that of
its LoRA adapters, in the same steps. And that of two engines on one host, started twice: the second start reads its
programs from the compile cache.

Engine 1 has no chip with the number 0, and runs programs that engine 0 has compiled. On v6e, programs that are read for
chips other than 0 are said to halt the chip (https://github.com/jax-ml/jax/issues/38004, with libtpu 0.0.30).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from model.loading.source import DEMO, DEMO_FOLDER
from scripts.building.replicas import chips_of_this_host
from scripts.lab.chip.parts import Options, Result
from scripts.lab.load.servers import fetch, server

PROMPTS = (
    "What is 47 + 35?",
    "What is 12 + 9?",
    "What is 88 + 16?",
    "Which is larger, 31 or 57?",
    "Count from 4 to 9.",
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is 63 + 28?",
)
ADAPTERS = {"pirate": "Who are you?", "almanac": "Which river flows through Lumeria?"}  # and what each is asked
# Devices round differently. At a place where the CPU gives both tokens nearly the same probability, either is right.
NEAR_TIE = 0.2  # nats
ENGINES = 2
Token = dict[str, Any]  # an entry of the API's `logprobs.content`


def run(options: Options, result: Result) -> None:
    """Fills the result."""
    limits, prompts = small_server(rehearse=options.rehearse)
    limits += ["--enable-lora", "--lora-modules", *(f"{name}={DEMO_FOLDER / 'adapters' / name}" for name in ADAPTERS)]
    questions = [(DEMO, prompt) for prompt in prompts] + list(ADAPTERS.items())
    expected, _ = answers_of("cpu", limits, questions)
    found, attention = answers_of(options.device, limits, questions)
    result.figures |= {"attention": attention, "answers": []}
    result.say(f"Attention backend {attention['backend']}; self-test: {attention['self_test']}.")
    for backend, reason in attention["failures"].items():
        result.wrong(f"the server's self-test of {backend} failed: {reason}")
    result.say("")
    for (model, prompt), right, own in zip(questions, expected, found, strict=True):
        verdict = compare(right, own)
        text = "".join(token["token"] for token in own)
        result.figures["answers"].append({"model": model, "prompt": prompt, "text": text, "verdict": verdict})
        result.say(f"- {model}: {prompt} {text!r}: {verdict}")
        if verdict.startswith("WRONG"):
            result.wrong(f"{model}: {prompt}: {verdict}")


def run_two_engines(options: Options, result: Result) -> None:
    """Fills the result. All prompts are sent at once, so both engines answer."""
    if options.device != "cpu" and len(chips_of_this_host(options.device)) < ENGINES:
        result.say(f"Not checked: there is one chip here, and {ENGINES} engines need one each.")
        return
    limits, prompts = small_server(rehearse=options.rehearse)
    with tempfile.TemporaryDirectory() as cache:
        flags = [*limits, "--data-parallel-size", str(ENGINES), "--compile-cache", cache]
        questions = [(DEMO, prompt) for prompt in prompts]
        compiled, read = (answers_of(options.device, flags, questions)[0] for _ in range(2))
    for prompt, expected, found in zip(prompts, compiled, read, strict=True):
        verdict = compare(expected, found)
        result.say(f"- {prompt}: {verdict}")
        if verdict.startswith("WRONG"):
            result.wrong(f"{prompt}: with programs from the compile cache, {verdict}")


def small_server(*, rehearse: bool) -> tuple[list[str], Sequence[str]]:
    """The flags of a server of the demo that is soon ready, and the prompts for it."""
    rows, tokens, prompts = (2, 16, PROMPTS[:2]) if rehearse else (8, 64, PROMPTS)
    limits = ["--max-num-seqs", str(rows), "--max-num-batched-tokens", str(tokens), "--max-model-len", "128"]
    return [*limits, "--dtype", "bfloat16"], prompts


def compare(expected: Sequence[Token], found: Sequence[Token]) -> str:
    """The verdict on an answer's tokens."""
    for index, (right, own) in enumerate(zip(expected, found, strict=False)):
        if right["token"] == own["token"]:
            continue
        likely = {entry["token"]: entry["logprob"] for entry in right["top_logprobs"]}
        gap = right["logprob"] - likely.get(own["token"], float("-inf"))
        if gap <= NEAR_TIE:
            return f"equal until a near tie at token {index} ({gap:.2f} nats)"
        return f"WRONG: token {index} is {own['token']!r}, on the CPU {right['token']!r}"
    return "equal" if len(expected) == len(found) else "WRONG: one of the answers ends sooner"


def answers_of(
    device: str, flags: list[str], questions: Sequence[tuple[str, str]]
) -> tuple[list[list[Token]], dict[str, Any]]:
    """The answers' tokens, all questions at once, and what the server says of its attention backend.

    Args:
        questions: (model, prompt) of each.
    """
    with server("--device", device, *flags) as url, ThreadPoolExecutor(len(questions)) as threads:
        bodies = [
            {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 24,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 5,
            }
            for model, prompt in questions
        ]
        answers = list(threads.map(lambda body: fetch(f"{url}/v1/chat/completions", body), bodies))
        attention = fetch(f"{url}/health?verbose")["attention"]
    return [answer["choices"][0]["logprobs"]["content"] for answer in answers], attention
