"""Encodes and truncates prompts, which are texts or token ids, and decodes ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from server.api.answers.completion_writer import Prompt
from server.api.record import TRUNCATED, note
from server.api.request.sampling import check_ids
from server.api.served_model import ServedModel
from server.api.worker_threads import in_thread
from server.http.request_error import invalid
from server.text.stream import decode_text

MAX_BAD_WORD_CHARS = 256

Given = Sequence[str | list[int]]


async def read_prompts(
    model: ServedModel,
    param: str,
    given: Given,
    kept: slice = slice(None),
    *,
    special: bool = True,
    affixes: bool = True,
    decodes: bool = False,
) -> list[Prompt]:
    """Encodes texts, in a thread if they are long, and truncates all prompts. Raises RequestError 400 for an id that
    is not in the vocabulary.

    Args:
        param: the name of the field.
        kept: the part of a prompt that is kept.
        special: whether the text of a special token becomes that token.
        affixes: whether a text gets the tokens that the tokenizer adds around it.
        decodes: whether ids have a text.
    """
    tokenizer, vocab_size = model.tokenizer, model.vocab_size

    def read() -> list[Prompt]:
        encode = tokenizer.encode_marked if special else tokenizer.encode_plain
        encoded = iter(encode([prompt for prompt in given if isinstance(prompt, str)]))
        prompts = []
        for prompt in given:
            if isinstance(prompt, str):
                own = next(encoded)
                whole = tokenizer.with_affixes(own) if affixes else own
                ids = whole[kept]
                if len(ids) == len(whole):
                    start = 0 if whole[: len(own)] == own else tokenizer.with_affixes([-1]).index(-1)
                    prompts.append(Prompt(ids=ids, text=prompt, shown=range(start, start + len(own))))
                    continue
            else:
                check_ids(param, prompt, vocab_size)
                whole, ids = prompt, prompt[kept]
            note(TRUNCATED, *filter(None, [len(whole) - len(ids)]))
            text = decode_text(tokenizer, ids, skip_special_tokens=False) if decodes else ""
            prompts.append(Prompt(ids=ids, text=text, shown=range(len(ids))))
        return prompts

    return await in_thread(sum(map(len, given)), read)


async def read_ids(model: ServedModel, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of token ids. Many are decoded in a thread."""
    return await in_thread(len(ids), decode_text, model.tokenizer, ids, skip_special_tokens=skip_special_tokens)


async def read_bad_words(model: ServedModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word at the start of a text and after a space, as in vLLM. Raises RequestError 400 for
    words that cannot be barred.

    The form after a space is included if it begins with another token and is no longer. Otherwise the space is a
    separate token, and the word after it is barred already."""
    for word in words:
        if not word.strip():
            raise invalid("bad_words", "a word must not be empty")
        if len(word) > MAX_BAD_WORD_CHARS:
            raise invalid("bad_words", f"a word has at most {MAX_BAD_WORD_CHARS} characters, got {len(word)}")
    bare = [word.lstrip() for word in words]
    forms = [*bare, *(" " + word for word in bare)]
    encoded = [tuple(form.ids) for form in await read_prompts(model, "bad_words", forms, special=False, affixes=False)]
    pairs = zip(encoded[: len(bare)], encoded[len(bare) :], strict=True)
    found = [(one, other) if len(other) == len(one) and other[0] != one[0] else (one,) for one, other in pairs]
    return tuple(dict.fromkeys(chain.from_iterable(found)))
