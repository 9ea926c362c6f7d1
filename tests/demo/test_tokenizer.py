"""The demo's tokenizer, trained here on a little text: Llama 3's special tokens and chat format, single digits."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from scripts.demo import stories
from scripts.demo import tokenizer as demo_tokenizer
from scripts.demo.arithmetic import Arithmetic
from scripts.demo.corpus import Chat, Corpus, Document
from scripts.demo.tokenizer import SPECIAL_TOKENS, SampleEncoder

VOCAB_SIZE = 640


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    arithmetic, rng = Arithmetic(), random.Random(0)
    texts = [stories.story(rng).text for _ in range(200)]
    texts += [arithmetic.sum(rng)[0] for _ in range(200)]
    return demo_tokenizer.train(texts, VOCAB_SIZE)


@pytest.fixture(scope="module")
def hugging_face(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    demo_tokenizer.save(tokenizer, folder, max_length=1024)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def test_the_vocabulary_has_the_size_asked_for_and_special_tokens_last(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(VOCAB_SIZE - len(SPECIAL_TOKENS), VOCAB_SIZE))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="too little text for vocab_size=5000"):
        demo_tokenizer.train(["only a few words"], 5000)


def test_every_digit_is_a_token(tokenizer: Tokenizer) -> None:
    for number in (0, 7, 10, 99, 198, 1234567890):
        encoded = tokenizer.encode(f"{number}", add_special_tokens=False)
        assert encoded.tokens == list(str(number))
    assert tokenizer.encode("47 + 35 = 82.", add_special_tokens=False).tokens[:5] == ["4", "7", "Ġ+", "Ġ", "3"]
    longer_than_a_digit = [t for t in tokenizer.get_vocab(with_added_tokens=False) if any(map(str.isdigit, t))]
    assert all(len(token) == 1 for token in longer_than_a_digit)


@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not any(token in text for token in SPECIAL_TOKENS):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_plain_text_begins_with_begin_of_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Once").tokens[0] == "<|begin_of_text|>"


def test_the_chat_format_is_llama_3s(hugging_face: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Hello "},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "Bye"},
    ]
    expected = (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi!<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    )
    assert hugging_face.apply_chat_template(messages, tokenize=False) == expected
    with_prompt = hugging_face.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert with_prompt == expected + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def test_training_reads_what_the_chat_template_renders(
    tokenizer: Tokenizer, hugging_face: PreTrainedTokenizerFast
) -> None:
    encoder = SampleEncoder(tokenizer, prompt_weight=0.5)
    corpus, rng = Corpus(Arithmetic(), sum_share=0.3, story_share=0.3), random.Random(1)
    chats = [sample for sample in (corpus.long(rng) for _ in range(200)) if isinstance(sample, Chat)]
    assert len(chats) > 100
    for chat in chats:
        messages = [] if chat.system is None else [{"role": "system", "content": chat.system}]
        for question, answer in chat.turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids, weights = encoder.encode(chat)
        assert ids == hugging_face.apply_chat_template(messages)["input_ids"]
        assert len(weights) == len(ids)
        prompt = hugging_face.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        *earlier, (question, answer) = chat.turns
        assert encoder.prompt(chat.system, earlier, question) == prompt
        # The last answer and the end of its turn weigh 1, the header before it nothing.
        answer_ids = ids[len(prompt) :]
        assert tokenizer.decode(answer_ids, skip_special_tokens=False) == answer + "<|eot_id|>"
        assert weights[len(prompt) - 4 :] == [0.0] * 4 + [1.0] * len(answer_ids)


def test_weights_of_a_document(tokenizer: Tokenizer) -> None:
    ids, weights = SampleEncoder(tokenizer, prompt_weight=0.5).encode(Document("1 + 2 = 3\n"))
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|begin_of_text|>1 + 2 = 3\n<|end_of_text|>"
    assert weights == [0.0] + [1.0] * (len(ids) - 1)
