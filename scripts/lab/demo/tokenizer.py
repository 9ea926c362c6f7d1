"""A byte-level BPE tokenizer with Llama 3's special tokens, split pattern and chat format, but one token per digit.

Llama 3 groups up to three digits in a token. A model of this size adds much better if every digit is a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from scripts.lab.demo.arithmetic import Turn
from scripts.lab.demo.corpus import Chat, Document, Sample

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"
START_HEADER = "<|start_header_id|>"
END_HEADER = "<|end_header_id|>"
END_OF_MESSAGE = "<|eom_id|>"
END_OF_TURN = "<|eot_id|>"
PADDING = "<|finetune_right_pad_id|>"
# In the same order as in Llama 3.1, and also after the ordinary tokens.
SPECIAL_TOKENS = (
    BEGIN_OF_TEXT,
    END_OF_TEXT,
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    PADDING,
    "<|reserved_special_token_2|>",
    START_HEADER,
    END_HEADER,
    END_OF_MESSAGE,
    END_OF_TURN,
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 8)),
)

# Llama 3's pattern with \p{N}{1,3} replaced by \p{N}.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TURN_ROLES = ("user", "assistant", "ipython", "assistant")
TOOLS_HEADING = "You may call these functions:"
# Llama 3.1's form in fewer words: tools are shown in the system turn, calls are JSON, results have the role `ipython`.
# On one line: engines configure Jinja's white space around blocks differently, and the rendering must be the same.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\n" + TOOLS_HEADING + "' }}"
    "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{% if messages[0]['role'] == 'system' %}"
    "{{ '\\n\\n' + (messages[0]['content'] | trim) }}{% set messages = messages[1:] %}"
    "{% endif %}"
    "{{ '<|eot_id|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'ipython' if message['role'] == 'tool' else message['role'] %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"
    "{{ (message['content'] or '') | trim }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set arguments = call['function']['arguments'] %}"
    "{{ ('' if loop.first else '; ') + '{\"name\": \"' + call['function']['name'] + '\", \"parameters\": ' }}"
    "{{ (arguments if arguments is string else (arguments | tojson)) + '}' }}"
    "{% endfor %}"
    "{{ '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids, special tokens last, from the words of `texts`.

    Raises:
        ValueError: the texts are too few for that many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    num_ordinary = vocab_size - len(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=num_ordinary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != num_ordinary:
        raise ValueError(f"too little text for {vocab_size=}: only {tokenizer.get_vocab_size()} ordinary tokens")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN_OF_TEXT} $A",
        pair=f"{BEGIN_OF_TEXT} $A {BEGIN_OF_TEXT}:1 $B:1",
        special_tokens=[(BEGIN_OF_TEXT, tokenizer.token_to_id(BEGIN_OF_TEXT))],
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json` in Hugging Face's form."""
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BEGIN_OF_TEXT, "eos_token": END_OF_TURN, "pad_token": PADDING}
    config = {
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token in SPECIAL_TOKENS
        },
        **names,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n")


class SampleEncoder:
    """Encodes samples to ids and per-token loss weights."""

    def __init__(self, tokenizer: Tokenizer, *, prompt_weight: float):
        self.tokenizer = tokenizer
        self.prompt_weight = prompt_weight  # of user and system tokens; tokens of answers have weight 1
        vocabulary = tokenizer.get_vocab()
        self._ids = {token: vocabulary[token] for token in SPECIAL_TOKENS}

    def special(self, token: str) -> int:
        """The id of one of SPECIAL_TOKENS."""
        return self._ids[token]

    def text(self, text: str) -> list[int]:
        """The ids of plain text, without special tokens around it."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def header(self, role: str) -> list[int]:
        """The ids that begin a message of `role`."""
        return [self._ids[START_HEADER], *self.text(role), self._ids[END_HEADER], *self.text("\n\n")]

    def prompt(
        self, system: str | None, turns: Iterable[Turn], question: str | Turn, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """The ids of the prompt for `question`, the same as those of the rendered chat template. The question may be a
        turn that ends with a tool's result."""
        asked = (question,) if isinstance(question, str) else question
        chat = Chat(system, [*turns, asked], tools)
        return self._chat(chat)[0] + self.header("assistant")

    def encode(self, sample: Sample) -> tuple[list[int], list[float]]:
        """The ids, and for each id the loss weight of its prediction."""
        if isinstance(sample, Document):
            return self._document(sample)
        return self._chat(sample)

    def _document(self, sample: Document) -> tuple[list[int], list[float]]:
        ids = [self._ids[BEGIN_OF_TEXT], *self.text(sample.text), self._ids[END_OF_TEXT]]
        return ids, [0.0, *[1.0] * (len(ids) - 1)]

    def _chat(self, sample: Chat) -> tuple[list[int], list[float]]:
        ids, weights = [self._ids[BEGIN_OF_TEXT]], [0.0]
        for role, text in _messages(sample):
            header, content = self.header(role), [*self.text(text), self._ids[END_OF_TURN]]
            weight = {"user": self.prompt_weight, "assistant": 1.0}.get(role, 0.0)
            ids += header + content
            weights += [0.0] * len(header) + [weight] * len(content)
        return ids, weights


def _messages(chat: Chat) -> Iterator[tuple[str, str]]:
    """(role, text) of each message."""
    system = [] if chat.system is None else [chat.system]
    if chat.tools:
        system.insert(0, "\n".join([TOOLS_HEADING, *map(json.dumps, chat.tools)]))
    if system:
        yield "system", "\n\n".join(system)
    for turn in chat.turns:
        yield from zip(TURN_ROLES, turn, strict=False)
