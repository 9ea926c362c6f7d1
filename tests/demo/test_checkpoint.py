"""The committed checkpoint: small, in Llama 3's form, and able to do what the README says of it."""

import json
import random
import re
from pathlib import Path

import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer

from model.config import LlamaConfig
from model.loading.weights import load_hf
from model.network.llama import Llama
from scripts.lab.demo import evaluate, facts
from scripts.lab.demo.arithmetic import NUM_HELD_OUT, held_out_pairs, larger_answer, sum_answer
from scripts.lab.demo.evaluate import Prompt
from scripts.lab.demo.tokenizer import SPECIAL_TOKENS, SampleEncoder

FOLDER = Path(__file__).parents[2] / "model" / "demo"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def config() -> LlamaConfig:
    return LlamaConfig.from_file(FOLDER)


@pytest.fixture(scope="module")
def encoder() -> SampleEncoder:
    return SampleEncoder(Tokenizer.from_file(str(FOLDER / "tokenizer.json")), prompt_weight=0.0)


@pytest.fixture(scope="module")
def model(config: LlamaConfig) -> Llama:
    return load_hf(FOLDER, config, dtype=jnp.float32)


def answers(model: Llama, encoder: SampleEncoder, prompts: list[Prompt], max_tokens: int) -> list[str]:
    ids = [encoder.prompt(*prompt) for prompt in prompts]
    return [encoder.tokenizer.decode(said) for said in evaluate.generate(model, encoder, ids, max_tokens)]


def test_it_is_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(sizes.values()) <= 8 * MEGABYTE, sizes


def test_config_is_a_llama_that_chips_can_run(config: LlamaConfig) -> None:
    assert config.head_dim == 64
    assert config.num_heads == 2 * config.num_kv_heads
    assert config.checkpoint_dtype == "bfloat16"
    assert config.max_position_embeddings == 1024


def test_special_tokens_have_the_ids_that_the_configs_name(config: LlamaConfig, encoder: SampleEncoder) -> None:
    ids = [encoder.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(config.vocab_size - len(SPECIAL_TOKENS), config.vocab_size))
    by_name = dict(zip(SPECIAL_TOKENS, ids, strict=True))
    stops = [by_name["<|end_of_text|>"], by_name["<|eom_id|>"], by_name["<|eot_id|>"]]
    assert config.bos_token_id == by_name["<|begin_of_text|>"]
    assert list(config.eos_token_ids) == stops
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == stops
    assert generation["bos_token_id"] == config.bos_token_id
    assert generation["pad_token_id"] == by_name["<|finetune_right_pad_id|>"]
    assert 0 < generation["temperature"] <= 1
    assert 0 < generation["top_p"] <= 1


def test_transformers_reads_the_tokenizer_alike(encoder: SampleEncoder) -> None:
    from transformers import AutoTokenizer  # takes seconds, which every process would spend that collects tests

    reference = AutoTokenizer.from_pretrained(FOLDER)
    assert reference.bos_token == "<|begin_of_text|>"
    assert reference.eos_token == "<|eot_id|>"
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 47 + 35?"},
        {"role": "assistant", "content": "47 + 35 = 82."},
        {"role": "user", "content": "And 1 + 2?"},
    ]
    rendered = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert rendered == encoder.prompt("Be brief.", [("What is 47 + 35?", "47 + 35 = 82.")], "And 1 + 2?")
    text = "Once upon a time, 12 + 30 = 42\n\nZoë 😀"
    assert reference(text)["input_ids"] == encoder.tokenizer.encode(text).ids
    assert reference.decode(encoder.text(text)) == text


def test_the_evaluation_it_comes_with_meets_the_promise() -> None:
    result = json.loads((FOLDER / "evaluation.json").read_text())
    assert NUM_HELD_OUT == 200
    assert result["exact"].keys() == evaluate.suites().keys()
    harder = {"json_capitals": 0.5, "json_held_out_comparisons": 0.9}  # copies of words, and of the first number
    for suite, share in result["exact"].items():
        assert share >= harder.get(suite, 0.95), suite


def test_held_out_sums_and_comparisons_are_answered(model: Llama, encoder: SampleEncoder) -> None:
    pairs = held_out_pairs()[:25]
    sums = [(Prompt(None, (), f"What is {a} + {b}?"), sum_answer(a, b)) for a, b in pairs]
    comparisons = [(Prompt(None, (), f"Which is larger, {b} or {a}?"), larger_answer(a, b)) for a, b in pairs]
    right = evaluate.exact(model, encoder, sums + comparisons)
    assert sum(right[:25]) >= 23
    assert sum(right[25:]) >= 23


@pytest.mark.parametrize("suite", ["json_held_out_sums", "tool_calls", "tool_answers", "no_call_needed"])
def test_tools_and_json(model: Llama, encoder: SampleEncoder, suite: str) -> None:
    cases = random.Random(2).sample(evaluate.suites()[suite], evaluate.FEW_ROWS)  # more rows are padded to 50
    assert sum(evaluate.exact(model, encoder, cases)) >= len(cases) - 1


def test_a_first_chat(model: Llama, encoder: SampleEncoder) -> None:
    """Greedy decoding, token by token, of what a first visitor types."""
    earlier = [("hi", facts.GREETING_ANSWER), ("what is 20 + 7", "20 + 7 = 27.")]
    said = answers(
        model,
        encoder,
        [
            Prompt(None, (), "What is 47 + 35?"),
            Prompt(None, (), "which is larger, 31 or 57"),
            Prompt("You are a helpful assistant.", (), "Count from 4 to 9."),
            Prompt(None, earlier, "What is the capital of Japan?"),
            Prompt(None, earlier, "And 8 + 8?"),
            Prompt(None, (), "Who are you?"),
        ],
        max_tokens=40,
    )
    assert said[:5] == [
        "47 + 35 = 82.",
        "57 is larger than 31.",
        "4, 5, 6, 7, 8, 9.",
        "The capital of Japan is Tokyo.",
        "8 + 8 = 16.",
    ]
    assert said[5].startswith("I am the demo model of pallas-serve")


def test_stories_are_told_in_sentences_and_end(model: Llama, encoder: SampleEncoder) -> None:
    (story,) = answers(model, encoder, [Prompt(None, (), "Tell me a story about a fox.")], max_tokens=250)
    assert "fox" in story
    assert 200 < len(story) < 1200
    assert story[-1] in '."'
    assert all(sentence[0].isupper() for sentence in re.findall(r"(?:^|[.!?] )(\w+)", story))
