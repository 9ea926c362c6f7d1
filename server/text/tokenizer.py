"""Converts text to ids and ids to bytes, from a checkpoint's `tokenizer.json`.

Special tokens are never recognised inside plain text, so users cannot type them. The caller marks their positions
(`encode_parts`). Every id has a fixed byte string, so decoding takes one look-up per token and decodes no text twice.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from model.inputs.gguf import is_gguf
from model.inputs.json_file import check_size
from model.inputs.limits import MAX_TOKENIZER_BYTES, MAX_VOCAB_SIZE
from model.inputs.words import shown
from server.text.gguf_tokenizer import read_gguf_tokenizer
from server.text.special_tokens import Part, SpecialTokens
from server.text.tiktoken_model import DEFAULT_TOKENS, tokenizer_from_tiktoken
from server.text.tokenizer_files import ChatTemplates, chat_templates, special_tokens

if TYPE_CHECKING:
    from server.text.transformers_parts import FastTokenizer

logger = logging.getLogger("pallas_serve")

MAX_SPARE_TOKENS = 1024  # special tokens after the model's vocabulary: added by fine-tuning, but not trained
_PROBE = "".join(map(chr, range(0x800))) + "語🙂"  # nearly every byte that UTF-8 has
LONG_TEXT_CHARS = 20_000  # from this length on encoding takes 10 ms or more, and the library's threads save time


class ByteLevelTokenizer:
    """A byte-level BPE tokenizer (Llama 3's kind) from a checkpoint folder. Raises ValueError for another kind.

    Args:
        config: the tokens that templates use by name: bos_token, eos_token and so on.
        vocab_size: the model's. Plain text never becomes an id at or above it. A special token may have such an id; a
            request with that token is refused.
    """

    digest: bytes | None = None  # of its file; None: it comes from no file, or from a GGUF file

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, str],
        chat_template: str | ChatTemplates | None,
        vocab_size: int = MAX_VOCAB_SIZE,
    ) -> None:
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError(f"the tokenizer is not a byte-level BPE one: {type(backend.decoder).__name__=}")
        if getattr(backend.model, "dropout", None):
            raise ValueError(f"the tokenizer draws at random how a text is cut: {backend.model.dropout=}")
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        if not isinstance(chat_template, ChatTemplates):
            chat_template = ChatTemplates(default=chat_template)
        self.chat_templates: ChatTemplates = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: id for id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        self._split = SpecialTokens(self.special_tokens).split
        vocab = backend.get_vocab(with_added_tokens=True)
        self._check_ids(vocab, vocab_size)
        # By id; b"" for unused ids.
        self.token_bytes = _token_bytes(vocab, {token.content for token in added.values()}, vocab_size)
        self.max_token_chars = max(map(len, self.token_bytes), default=0)  # no token stands for more characters of text
        if not self.max_token_chars:
            raise ValueError("the tokenizer has no tokens")
        self._affixes = _affixes(backend, vocab_size)
        self.template_variables = dict(config)  # bos_token, eos_token and so on

    def _check_ids(self, vocab: Mapping[str, int], vocab_size: int) -> None:
        by_id: dict[int, str] = {}
        for token, id in vocab.items():
            if by_id.setdefault(id, token) != token:
                raise ValueError(f"the tokens {shown(by_id[id])} and {shown(token)} have the same id, {id}")
        beyond = {token: id for token, id in vocab.items() if id >= vocab_size}
        wrong = {
            token: id
            for token, id in beyond.items()
            if id not in self.special_ids or id >= vocab_size + MAX_SPARE_TOKENS
        }
        if wrong:
            raise ValueError(f"{len(wrong)} tokens have ids that a model of {vocab_size} does not know: {shown(wrong)}")
        if beyond:
            logger.warning("prompts with %s are refused: the model knows %d ids only", shown(beyond), vocab_size)

    @classmethod
    def from_folder(
        cls, folder: Path, *, vocab_size: int = MAX_VOCAB_SIZE, known: Iterable[ByteLevelTokenizer] = ()
    ) -> ByteLevelTokenizer:
        """Reads `tokenizer.json` (or a tiktoken-style `tokenizer.model`), `tokenizer_config.json` and the templates.

        In place of a folder there may be a GGUF file, which holds all of them. The vocabulary takes 100 MB, so one that
        is equal to that of a `known` tokenizer is shared.

        Raises ValueError if the tokenizer is missing, is of another kind or does not fit a model of `vocab_size` ids.
        """
        digest = None
        if is_gguf(folder):
            path, found = folder, read_gguf_tokenizer(folder)
            backend, variables, templates = found.backend, found.variables, found.chat_templates
        else:
            if (path := folder / "tokenizer.json").exists():
                read, variables = _read_backend, {}
            elif (path := folder / "tokenizer.model").exists():
                read, variables = tokenizer_from_tiktoken, dict(DEFAULT_TOKENS)
            else:
                raise ValueError(f"{folder} holds neither tokenizer.json nor tokenizer.model")
            variables |= special_tokens(folder)
            templates = chat_templates(folder)
            check_size(path, MAX_TOKENIZER_BYTES)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
            for other in known:
                if other.digest == digest:
                    return other.with_files(variables, templates)
            backend = read(path)
        try:
            tokenizer = cls(backend, config=variables, chat_template=templates, vocab_size=vocab_size)
            tokenizer.digest = digest
            return tokenizer
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def with_files(self, config: Mapping[str, str], chat_templates: ChatTemplates) -> ByteLevelTokenizer:
        """The same vocabulary, with the named tokens and the templates of other files."""
        other = copy.copy(self)
        other.template_variables, other.chat_templates = dict(config), chat_templates
        return other

    def encode_plain(self, texts: list[str]) -> list[list[int]]:
        """Each text's ids. The text of a special token is encoded as plain text. Releases the GIL."""
        # A batch runs on the library's threads. On a busy machine their start takes longer than encoding short texts.
        if sum(map(len, texts)) < LONG_TEXT_CHARS:
            return [self._backend.encode(text, add_special_tokens=False).ids for text in texts]
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_marked(self, texts: list[str]) -> list[list[int]]:
        """Each text's ids. The text of a special token becomes that token."""
        return self.encode_all([self._split(text) for text in texts])

    def encode_all(self, prompts: Sequence[Sequence[Part]]) -> list[list[int]]:
        """Each prompt's ids. Special parts become their ids. Plain parts are encoded as text, even if they hold the
        text of a special token."""
        plain = iter(self.encode_plain([part.text for parts in prompts for part in parts if not part.special]))
        encoded: list[list[int]] = []
        for parts in prompts:
            ids: list[int] = []
            for part in parts:
                if part.special:
                    ids.append(self.special_tokens[part.text])
                else:
                    ids += next(plain)
            encoded.append(ids)
        return encoded

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """The ids of a text that has been split at its special tokens."""
        return self.encode_all([parts])[0]

    def vocabulary_string(self, token_id: int) -> str:
        """A token as the vocabulary writes it: bytes as letters, `Ġ` for a space. Empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def with_affixes(self, ids: list[int], *, again: bool = False) -> list[int]:
        """The ids, with those that the tokenizer adds around every text (Llama 3: begin-of-text). A text that begins
        with them, as one that a template has rendered does, gets second ones only if `again` says so."""
        before, after = self._affixes
        has_them = not again and before and ids[: len(before)] == before
        return [*(() if has_them else before), *ids, *after]

    def to_transformers(self) -> FastTokenizer:
        """A tokenizer of transformers, with the same vocabulary, named tokens and chat templates."""
        from server.text.transformers_parts import fast_tokenizer

        copied = tokenizers.Tokenizer.from_str(self._backend.to_str())
        template = self.chat_templates.for_transformers()
        return fast_tokenizer(tokenizer_object=copied, chat_template=template, **self.template_variables)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    with _in_words(f"{path} is not a tokenizer that can be read"):
        return tokenizers.Tokenizer.from_file(str(path))


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Raises ValueError in place of the `tokenizers` library's errors: bare `Exception`s, and panics, which are not
    `Exception`s."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from error


def _token_bytes(vocab: Mapping[str, int], added: set[str], vocab_size: int) -> list[bytes]:
    """The bytes of each id. A token with letters outside the byte alphabet stands for itself, as in the library's
    decoder."""
    to_byte = _byte_alphabet()
    alphabet = frozenset(map(chr, to_byte))
    known = {token: id for token, id in vocab.items() if id < vocab_size}
    table = [b""] * (max(known.values(), default=-1) + 1)
    for token, id in known.items():
        is_bytes = token not in added and alphabet.issuperset(token)
        table[id] = token.translate(to_byte).encode("latin-1") if is_bytes else token.encode()
    return table


def _byte_alphabet() -> dict[int, int]:
    """The byte that each letter of a byte-level vocabulary stands for. Letters of Latin-1 stand for their own byte, and
    the others, in their order, for the bytes that are left."""
    letters = sorted(map(ord, ByteLevel.alphabet()))
    own = [letter for letter in letters if letter < 256]
    left = sorted(set(range(256)).difference(own))
    return dict(zip(letters, own + left, strict=True))


def _affixes(backend: tokenizers.Tokenizer, vocab_size: int) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after every text."""
    with _in_words("the tokenizer cannot encode a text"):
        backend.encode(_PROBE, add_special_tokens=False)
        bare = backend.encode("a", add_special_tokens=False).ids
        full = backend.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(full) + 1) if full[i : i + len(bare)] == bare), None)
    if start is None:
        raise ValueError("the tokenizer's post-processor does not keep the text that it is given")
    before, after = full[:start], full[start + len(bare) :]
    if unknown := [id for id in before + after if id >= vocab_size]:
        raise ValueError(f"the tokenizer adds ids to every text that a model of {vocab_size} does not know: {unknown}")
    return before, after
