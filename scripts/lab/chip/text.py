"""The demo's greedy text on this device, from a whole server over HTTP, against the text of a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripts.lab.chip.options import Options
from scripts.lab.chip.result import Result
from scripts.lab.chip.serving import fetch, server

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
# Devices round differently. At a place where the CPU gives both tokens nearly the same probability, either is right.
NEAR_TIE = 0.2  # nats
Token = dict[str, Any]  # an entry of the API's `logprobs.content`


def run(options: Options, result: Result) -> None:
    """Fills the result."""
    limits, prompts = small_server(rehearse=options.rehearse)
    expected, _ = answers_of("cpu", limits, prompts)
    found, attention = answers_of(options.device, limits, prompts)
    result.figures |= {"attention": attention, "answers": []}
    result.say(f"Attention backend {attention['backend']}; self-test: {attention['self_test']}.")
    for backend, reason in attention["failures"].items():
        result.wrong(f"the server's self-test of {backend} failed: {reason}")
    result.say("")
    for prompt, right, own in zip(prompts, expected, found, strict=True):
        verdict = compare(right, own)
        text = "".join(token["token"] for token in own)
        result.figures["answers"].append({"prompt": prompt, "text": text, "verdict": verdict})
        result.say(f"- {prompt} {text!r}: {verdict}")
        if verdict.startswith("WRONG"):
            result.wrong(f"{prompt}: {verdict}")


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


def answers_of(device: str, flags: list[str], prompts: Sequence[str]) -> tuple[list[list[Token]], dict[str, Any]]:
    """The answers' tokens, all prompts at once, and what the server says of its attention backend."""
    with server("--device", device, *flags) as url, ThreadPoolExecutor(len(prompts)) as threads:
        bodies = [
            {
                "model": "demo",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 24,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 5,
            }
            for prompt in prompts
        ]
        answers = list(threads.map(lambda body: fetch(f"{url}/v1/chat/completions", body), bodies))
        attention = fetch(f"{url}/health?verbose")["attention"]
    return [answer["choices"][0]["logprobs"]["content"] for answer in answers], attention
