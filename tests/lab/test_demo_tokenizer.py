"""The demo's tokenizer, trained here on a little text: Llama 3's special tokens and chat format, single digits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from scripts.lab.demo import stories
from scripts.lab.demo import tokenizer as demo_tokenizer
from scripts.lab.demo.arithmetic import Arithmetic, Turn
from scripts.lab.demo.corpus import Chat, Corpus
from scripts.lab.demo.tokenizer import SampleEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 640


def as_messages(turn: Turn) -> list[dict[str, Any]]:
    """As a request has them."""
    if len(turn) == 2:
        return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)]
    question, call, result, answer = turn
    called = json.loads(call)
    function = {"name": called["name"], "arguments": called["parameters"]}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    arithmetic, rng = Arithmetic(), random.Random(0)
    texts = [stories.story(rng).text for _ in range(200)]
    texts += [arithmetic.sum(rng)[0] for _ in range(200)]
    return demo_tokenizer.train(texts, VOCAB_SIZE)


@pytest.fixture(scope="module")
def hugging_face(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast  # takes a second, which every process would spend that collects

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    demo_tokenizer.save(tokenizer, folder, max_length=1024)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def test_training_reads_what_the_chat_template_renders(
    tokenizer: Tokenizer, hugging_face: PreTrainedTokenizerFast
) -> None:
    encoder = SampleEncoder(tokenizer, prompt_weight=0.5)
    corpus, rng = Corpus(Arithmetic(), sum_share=0.3, story_share=0.3), random.Random(1)
    samples = [draw(rng) for draw in (corpus.short, corpus.long, corpus.with_tools) for _ in range(100)]
    chats = [sample for sample in samples if isinstance(sample, Chat)]
    assert len(chats) > 200
    for chat in chats:
        messages = [] if chat.system is None else [{"role": "system", "content": chat.system}]
        for turn in chat.turns:
            messages += as_messages(turn)
        ids, weights = encoder.encode(chat)
        tools = list(chat.tools) or None
        assert ids == hugging_face.apply_chat_template(messages, tools=tools)["input_ids"]
        assert len(weights) == len(ids)
        prompt = hugging_face.apply_chat_template(messages[:-1], tools=tools, add_generation_prompt=True)["input_ids"]
        *earlier, (*question, answer) = chat.turns
        assert encoder.prompt(chat.system, earlier, tuple(question), chat.tools) == prompt
        # The last answer and the end of its turn weigh 1, the header before it nothing.
        answer_ids = ids[len(prompt) :]
        assert tokenizer.decode(answer_ids, skip_special_tokens=False) == answer + "<|eot_id|>"
        assert weights[len(prompt) - 4 :] == [0.0] * 4 + [1.0] * len(answer_ids)
