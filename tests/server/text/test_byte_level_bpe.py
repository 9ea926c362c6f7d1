"""The letters of bytes, and tiktoken's ranks, next to `transformers`."""

from __future__ import annotations

import base64
import random

from server.text.byte_level_bpe import byte_letters
from server.text.tiktoken_model import special_tokens, tokenizer_from_tiktoken

TEXTS = ["hello hello  world's 12345", "é日本\n\n 🙂 ok", " ", "aaaaaa abab bababa\t\r\n x", ""]


def test_the_letters_are_those_of_transformers():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert dict(enumerate(byte_letters())) == bytes_to_unicode()


def test_ranks_make_the_tokenizer_of_transformers(tmp_path):
    """Of random tokens: several pairs may make the same one, and some can be reached by no merge."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    random_letters = random.Random(0)
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    tokens |= dict.fromkeys(bytes(random_letters.choices(b"ab \n", k=random_letters.randint(2, 5))) for _ in range(120))
    tokens |= dict.fromkeys([b"he", b"ll", b"hell", b"hello", b" wor", "日".encode()])
    ranks = {token: rank for rank, token in enumerate(tokens)}
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()))
    own = tokenizer_from_tiktoken(path)
    converter = TikTokenConverter(vocab_file=path, extra_special_tokens=special_tokens())
    converter.load_tiktoken_bpe = lambda _: ranks
    reference = converter.converted()
    assert own.get_vocab() == reference.get_vocab()
    for text in [*TEXTS, *("".join(random_letters.choices("ab \n", k=40)) for _ in range(50))]:
        assert own.encode(text, add_special_tokens=False).ids == reference.encode(text, add_special_tokens=False).ids
