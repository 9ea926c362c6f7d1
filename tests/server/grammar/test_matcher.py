"""Matchers over the demo's own tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate

from batcher.grammar import GrammarError
from server.grammar.compiler import Vocabulary
from server.grammar.forms import json_schema_grammar, lark_grammar, regex_grammar
from server.grammar.matcher import CACHE_SIZE, MAX_NUMBER_CHARS, TokenGrammars, vocabulary_of
from server.text.tokenizer import ByteLevelTokenizer
from tests.examples import examples
from tests.server.support.schemas import schemas

DEMO = Path(__file__).parents[3] / "model" / "demo"
EXTRA_IDS = 40  # of the model, beyond the tokenizer's


@cache
def demo() -> tuple[ByteLevelTokenizer, TokenGrammars, tuple[int, ...]]:
    tokenizer = ByteLevelTokenizer.from_folder(DEMO)
    ends = tuple(tokenizer.special_tokens[name] for name in ("<|end_of_text|>", "<|eot_id|>"))
    size = len(tokenizer.token_bytes) + EXTRA_IDS
    return tokenizer, TokenGrammars(lambda: vocabulary_of(tokenizer, vocab_size=size, end_ids=ends)), ends


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(grammar: str, rng: np.random.Generator, most: int = 4000, start: str = "") -> tuple[str, bool]:
    """A text drawn from what the masks let through, with a liking for ends; whether it came to its end."""
    tokenizer, grammars, ends = demo()
    matcher = grammars.matcher(grammar)
    drawn = tokenizer.encode_plain([start])[0]
    permit = matcher.advance(drawn)
    while not permit.is_over and len(drawn) < most:
        ids = allowed(permit.mask)
        assert not (set(ids) & tokenizer.special_ids) - set(ends)
        assert max(ids) < len(tokenizer.token_bytes)
        if set(ids) & set(ends):
            break
        closing = [i for i in ids if tokenizer.token_bytes[i][:1] in (b'"', b"'", b"]", b"}", b")")]
        ids = closing if closing and rng.random() < 0.3 else ids
        drawn.append(int(rng.choice(ids)))
        permit = matcher.advance((drawn[-1],))
    return b"".join(tokenizer.token_bytes[i] for i in drawn).decode(), len(drawn) < most


@settings(max_examples=examples(40))
@given(schemas, st.integers(0, 2**32))
def test_every_text_of_a_schema_is_valid_by_it(schema, seed) -> None:
    text, is_whole = walk(json_schema_grammar(schema), np.random.default_rng(seed))
    if is_whole:
        validate(json.loads(text), schema)


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "number"}, {}, {"type": "array"}], ids=str)
@pytest.mark.parametrize("digit", ["7", "0"])
def test_a_number_ends_for_a_model_that_writes_digits_only(schema, digit) -> None:
    tokenizer, grammars, _ = demo()
    matcher = grammars.matcher(json_schema_grammar(schema))
    start = {"array": "[3."}.get(schema.get("type"), "3" if schema.get("type") == "integer" else "3.")
    drawn = tokenizer.encode_plain([start])[0]
    permit = matcher.advance(drawn)
    (token,) = tokenizer.encode_plain([digit])[0]
    while not permit.is_over and token in allowed(permit.mask):
        drawn.append(token)
        permit = matcher.advance((token,))
    text = b"".join(tokenizer.token_bytes[i] for i in drawn).decode()
    assert MAX_NUMBER_CHARS <= len(text) <= MAX_NUMBER_CHARS + 8
    assert permit.is_over or allowed(permit.mask)


@pytest.mark.parametrize(
    "grammar",
    [json_schema_grammar({"type": "string"}), json_schema_grammar({"pattern": "^[0-9]{90}$", "type": "string"})],
)
def test_digits_of_a_string_have_no_bound(grammar) -> None:
    tokenizer, grammars, _ = demo()
    matcher = grammars.matcher(grammar)
    permit = matcher.advance(tokenizer.encode_plain(['"'])[0])
    (token,) = tokenizer.encode_plain(["7"])[0]
    for _ in range(90):
        assert token in allowed(permit.mask)
        permit = matcher.advance((token,))


def test_characters_of_several_tokens_are_whole() -> None:
    text, is_whole = walk(regex_grammar("[語🙂é]{20}"), np.random.default_rng(1))
    assert is_whole
    assert len(text) == 20
    assert set(text) <= set("語🙂é")


def test_bytes_that_must_come_are_drawn_as_the_models_tokens() -> None:
    tokenizer, grammars, _ = demo()
    sentence = "What is the capital of France?"
    matcher = grammars.matcher(regex_grammar(sentence.replace("?", r"\?")))
    permit, drawn = matcher.advance(()), []
    while not permit.is_over:
        (token,) = allowed(permit.mask)
        drawn.append(token)
        permit = matcher.advance((token,))
    assert drawn == tokenizer.encode_plain([sentence])[0]


def test_a_token_that_the_mask_bars_is_an_error() -> None:
    tokenizer, grammars, _ = demo()
    matcher = grammars.matcher(regex_grammar("[0-9]+"))
    matcher.advance(())
    with pytest.raises(GrammarError, match="does not allow"):
        matcher.advance((tokenizer.special_tokens["<|start_header_id|>"],))


def properties(number: int) -> str:
    return json_schema_grammar({"type": "object", "properties": {f"f{i}": {"type": "integer"} for i in range(number)}})


@pytest.mark.parametrize("number", [1500, 2000])
def test_a_grammar_that_costs_too_much_says_so(number: int) -> None:
    tokenizer, grammars, _ = demo()
    matcher = grammars.matcher(properties(number))
    matcher.advance(())
    with pytest.raises(GrammarError, match=r"^the grammar is too costly; make it simpler.*row has \d+ items"):
        matcher.advance(tokenizer.encode_plain(["{"])[0])


def test_a_grammar_that_allows_no_token_says_so() -> None:
    _, grammars, _ = demo()
    with pytest.raises(GrammarError, match="it allows no token here"):
        grammars.matcher(lark_grammar("start: B\nB: /x/ & /y/")).advance(())


def test_matchers_of_one_grammar_go_their_own_ways() -> None:
    _, grammars, _ = demo()
    grammar = regex_grammar("ab|cd")
    first, second = grammars.matcher(grammar), grammars.matcher(grammar)
    first.advance((allowed(first.advance(()).mask)[0],))
    third = grammars.matcher(grammar)
    np.testing.assert_array_equal(second.advance(()).mask, third.advance(()).mask)


def test_the_cache_of_grammars_is_bounded() -> None:
    tokenizer, _, ends = demo()
    size = len(tokenizer.token_bytes)
    grammars = TokenGrammars(lambda: vocabulary_of(tokenizer, vocab_size=size, end_ids=ends))
    for i in range(CACHE_SIZE + 3):
        grammars.matcher(regex_grammar(f"a{i}")).advance(())
    assert grammars.compiled.cache_info().currsize == CACHE_SIZE


@pytest.mark.parametrize("num_optional", [100, 500])
def test_many_optional_properties_with_tokens_that_span_the_marks_of_json(num_optional: int) -> None:
    """A large vocabulary has tokens such as `",` and `":"`: all that may follow them is looked at for one mask."""
    schema = {
        "properties": {f"field_{i}": {"type": "string" if i % 2 else "integer"} for i in range(num_optional)},
        "additionalProperties": False,
    }
    marks = range(32, 127)
    tokens = [*(bytes([i]) for i in range(256)), *(bytes([a, b]) for a in marks for b in marks), b""]
    end = len(tokens) - 1
    vocabulary = Vocabulary(tokens, end_ids=[end], encode=lambda text: list(text.encode()))
    matcher = TokenGrammars(lambda: vocabulary).matcher(json_schema_grammar({"type": "object"} | schema))
    text = json.dumps({f"field_{i}": "abc" if i % 2 else i for i in range(0, num_optional, 7)})
    permit = matcher.advance([])
    for byte in text.encode():
        assert byte in allowed(permit.mask)
        permit = matcher.advance([byte])
    assert allowed(permit.mask) == [end]
