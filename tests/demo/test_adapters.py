"""The adapters that come with the demo: small, and with the answers that the demo's README shows."""

from __future__ import annotations

import os
import re

import pytest

from model.config import LlamaConfig
from model.loading.adapter import read_adapter
from model.loading.source import DEMO_FOLDER
from scripts.llm import LLM, LoRARequest

FOLDERS = {name: DEMO_FOLDER / "adapters" / name for name in ("pirate", "almanac")}
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 128, "num_pages": 40}
# The README's lines: "> question", and "name: answer" for the base ("demo") and each adapter.
SHOWN = re.compile(r"    > (?P<question>.+)\n(?P<answers>(?:    \w+ *: .+\n)+)")


def shown() -> list[tuple[str, str, str]]:
    """(question, adapter or "demo", answer)"""
    readme = (DEMO_FOLDER / "README.md").read_text()
    return [
        (match["question"], *re.split(r" *: ", line.strip(), maxsplit=1))
        for match in SHOWN.finditer(readme)
        for line in match["answers"].splitlines()
    ]


@pytest.mark.parametrize("name", FOLDERS)
def test_they_are_small_and_fit_the_demo(name: str) -> None:
    assert sum(path.stat().st_size for path in FOLDERS[name].iterdir()) <= 200_000
    weights = read_adapter(FOLDERS[name], LlamaConfig.from_file(DEMO_FOLDER), max_rank=4)
    assert [len(layer) for layer in weights.layers] == [7] * 4


@pytest.mark.slow
def test_the_answers_of_one_batch_are_those_of_the_readme() -> None:
    lines = shown()
    assert {name for _, name, _ in lines} == {"demo", *FOLDERS}
    requests = {name: LoRARequest(name, i, str(folder)) for i, (name, folder) in enumerate(FOLDERS.items(), 1)}
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    with LLM(model="demo", compile_cache=cache, enable_lora=True, max_loras=2, max_lora_rank=4, **LIMITS) as llm:
        results = llm.chat(
            [[{"role": "user", "content": question}] for question, _, _ in lines],
            {"temperature": 0, "max_tokens": 64},
            lora_request=[requests.get(name) for _, name, _ in lines],
        )
    assert [result.outputs[0].text for result in results] == [answer for _, _, answer in lines]
