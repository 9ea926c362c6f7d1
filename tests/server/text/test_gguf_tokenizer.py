"""The tokenizer of a GGUF file against the `tokenizer.json` of which the file was made."""

from __future__ import annotations

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.loading.source import DEMO_FOLDER
from server.text.gguf_tokenizer import LLAMA_3, MERGED
from server.text.tokenizer import ByteLevelTokenizer
from server.text.tokenizer_files import ChatTemplates
from tests.model.gguf_files import tokenizer_of

VOCAB_SIZE = 1536


def write(path, change=lambda writer: None):
    """A file with the demo's tokenizer and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    tokenizer_of(writer, DEMO_FOLDER)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def changed(**values):
    """Replaces metadata: `None` removes them."""

    def change(writer):
        for name, value in values.items():
            key = f"tokenizer.ggml.{name}"
            for part in writer.kv_data:
                part.pop(key, None)
            if value is not None:
                kind = gguf.GGUFValueType.get_type(value)
                writer.add_key_value(key, value, kind)

    return change


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("gguf") / "demo.gguf")
    return [ByteLevelTokenizer.from_folder(place, vocab_size=VOCAB_SIZE) for place in (path, DEMO_FOLDER)]


TEXTS = [
    "What is 47 + 35?",
    "1234567 and 3.14",
    "It's  what\n\n we'll see…",
    "日本語 ½²³ İstanbul 🙂",
    "<|eot_id|>",
    "\t \r\n x",
    "",
]


def test_texts_have_the_same_ids(both):
    found, wanted = both
    assert found.encode_plain(TEXTS) == wanted.encode_plain(TEXTS)


@given(text=st.text(max_size=200))
def test_any_text_has_the_same_ids(both, text):
    found, wanted = both
    assert found.encode_plain([text]) == wanted.encode_plain([text])


def test_all_else_is_the_same(both):
    found, wanted = both
    assert found.token_bytes == wanted.token_bytes
    assert found.special_tokens == wanted.special_tokens
    assert found.with_affixes([5]) == wanted.with_affixes([5]) == [1520, 5]
    assert found.chat_templates == wanted.chat_templates
    assert found.template_variables == wanted.template_variables
    assert [found.vocabulary_string(id) for id in range(VOCAB_SIZE)] == [
        wanted.vocabulary_string(id) for id in range(VOCAB_SIZE)
    ]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model='llama' is not supported"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre='qwen2' is not supported"),
        ({"pre": None}, "tokenizer.ggml.pre=None is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens=None is not a list of type str"),
        ({"merges": ["a"]}, "holds 'a', which is not two tokens"),
        ({"merges": ["a 語"]}, "names tokens that are not there"),
        ({"token_type": [1, 1]}, "has 2 entries for 1536 tokens"),
        ({"token_type": [3] + [1] * 1535}, "ordinary tokens after control tokens"),
        ({"bos_token_id": 9999}, "tokenizer.ggml.bos_token_id=9999 is not the id of a token"),
    ],
)
def test_others_are_refused_in_words(tmp_path, values, words):
    path = write(tmp_path / "x.gguf", changed(**values))
    with pytest.raises(ValueError) as error:
        ByteLevelTokenizer.from_folder(path, vocab_size=VOCAB_SIZE)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_named_templates_are_read(tmp_path):
    named = [{"name": name, "template": name.upper()} for name in ("default", "tool_use", "rag")]

    def change(writer):
        for part in writer.kv_data:
            part.pop("tokenizer.chat_template", None)
        writer.add_chat_template(named)

    found = ByteLevelTokenizer.from_folder(write(tmp_path / "x.gguf", change), vocab_size=VOCAB_SIZE)
    assert found.chat_templates == ChatTemplates(default="DEFAULT", tool_use="TOOL_USE")


@pytest.mark.parametrize("pre", LLAMA_3)
def test_names_of_the_same_pre_tokenizer(tmp_path, pre):
    path = write(tmp_path / "x.gguf", changed(pre=pre, add_bos_token=False))
    assert ByteLevelTokenizer.from_folder(path, vocab_size=VOCAB_SIZE).with_affixes([5]) == [5]


@pytest.mark.parametrize("pre", MERGED)
def test_names_with_which_words_are_merged(both, tmp_path, pre):
    path = write(tmp_path / "x.gguf", changed(pre=pre))
    merging, (whole, _) = ByteLevelTokenizer.from_folder(path, vocab_size=VOCAB_SIZE), both
    assert merging.with_affixes([5]) == [5]
    path = write(tmp_path / "bos.gguf", changed(pre=pre, add_bos_token=True))
    assert ByteLevelTokenizer.from_folder(path, vocab_size=VOCAB_SIZE).with_affixes([5]) == [1520, 5]
    assert merging.encode_plain(TEXTS) == whole.encode_plain(TEXTS)  # of the demo, all words are made by merges


def test_unused_tokens_at_the_end_mean_nothing(tmp_path):
    types = [1] * 1520 + [3] * 15 + [5]
    tokenizer = ByteLevelTokenizer.from_folder(write(tmp_path / "x.gguf", changed(token_type=types)))
    assert len(tokenizer.token_bytes) == 1535
