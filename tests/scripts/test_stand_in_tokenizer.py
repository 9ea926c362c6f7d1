"""The tokenizer of models that have none: whatever a model draws has a text, and text comes back as it went in."""

import pytest

from model.loading.source import resolve
from scripts.building.stand_in_tokenizer import tokenizer_folder, write_stand_in_tokenizer
from server.text.tokenizer import ByteLevelTokenizer


def test_every_byte_of_a_text_is_a_token_and_ids_are_words(tmp_path):
    write_stand_in_tokenizer(tmp_path, 1024)
    tokenizer = ByteLevelTokenizer.from_folder(tmp_path)
    text = "Grüße, 世界 <|eot_id|>"
    (ids,) = tokenizer.encode_plain([text])
    assert [tokenizer.token_bytes[id] for id in ids] == [bytes([byte]) for byte in text.encode()]  # no special token
    assert tokenizer.with_affixes(ids) == [768, *ids]
    assert len(tokenizer.token_bytes) == 1024
    assert all(tokenizer.token_bytes)
    assert tokenizer.token_bytes[300] == b" w44"


def test_special_tokens_have_the_ids_of_llama_3(tmp_path):
    write_stand_in_tokenizer(tmp_path, 128256)
    tokens = ByteLevelTokenizer.from_folder(tmp_path).special_tokens
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    assert [tokens[name] for name in names] == [128000, 128001, 128008, 128009]


def test_a_vocabulary_without_room_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=511"):
        write_stand_in_tokenizer(tmp_path, 511)


def test_it_stands_in_for_presets_only(tmp_path, model_folder):
    assert tokenizer_folder(None, resolve(str(model_folder)), tmp_path) == model_folder
    assert tokenizer_folder(tmp_path / "mine", resolve(str(model_folder)), tmp_path) == tmp_path / "mine"
    assert not list(tmp_path.iterdir())
    assert tokenizer_folder(None, resolve("preset:llama-3.2-1b"), tmp_path) == tmp_path
    assert (tmp_path / "tokenizer.json").is_file()
