"""Writes `llama_cpp.json` next to this file: what llama.cpp computes for the demo as a GGUF file of several types.

Not part of the product and not run by the tests: needs a `llama-server`, built from llama.cpp.

    python -m tests.model.goldens.make_llama_cpp ~/llama.cpp/build/bin/llama-server

The K/V are kept in float32, so that the weights' type is all that rounds; with weights in blocks llama.cpp also rounds
the activations.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file
from transformers import AutoTokenizer

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER
from tests.model import gguf_files
from tests.model.gguf_files import Type

FILE = Path(__file__).parent / "llama_cpp.json"
TYPES = (Type.F32, Type.BF16, Type.Q8_0, Type.Q4_0)
QUESTIONS = ("What is 47 + 35?", "Which is larger, 31 or 57?", "Tell me a story about a fox.", "Count from 4 to 9.")
NEW_TOKENS, NUM_TOP = 24, 5


def main() -> None:
    """The command."""
    (server,) = sys.argv[1:]
    config, tensors = LlamaConfig.from_file(DEMO_FOLDER), load_file(DEMO_FOLDER / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in QUESTIONS
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for type in TYPES:
            path = gguf_files.write(Path(folder) / f"{type.name}.gguf", config, tensors, type, tokenizer=DEMO_FOLDER)
            found[type.name] = answers(server, path, prompts)
    FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n")


def answers(server: str, path: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """For each prompt its greedy tokens, and the most likely tokens before each, with their log-probabilities."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["-m", str(path), "--port", str(port), *"-t 2 -c 1024 -np 1 -ctk f32 -ctv f32 -fa off".split()]
    with subprocess.Popen([server, *flags, "--no-warmup"], stderr=subprocess.DEVNULL) as process:
        try:
            return [answer(port, prompt) for prompt in prompts]
        finally:
            process.terminate()


def answer(port: int, prompt: list[int]) -> dict[str, Any]:
    """Waits for the server first."""
    asked = {
        "prompt": prompt,
        "n_predict": NEW_TOKENS,
        "temperature": 0,
        "n_probs": NUM_TOP,
        "return_tokens": True,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    for _ in range(300):
        try:
            with urllib.request.urlopen(request) as response:
                steps = json.load(response)["completion_probabilities"]
                break
        except urllib.error.URLError:
            time.sleep(0.1)
    else:
        raise RuntimeError("llama-server does not answer")
    return {
        "prompt": prompt,
        "tokens": [step["id"] for step in steps],
        "top": [[(top["id"], round(top["logprob"], 5)) for top in step["top_logprobs"]] for step in steps],
    }


if __name__ == "__main__":
    main()
