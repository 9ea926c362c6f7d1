"""A collection of JSON schemas of the kinds that people bring: which are served, and whether what is drawn is valid.

`schema_collection.json` was written for this test. An entry has the keywords that the header `x-unenforced-keywords`
names for it (`unenforced`), or the words with which it is refused (`refused`). The shares of all:

    python -m tests.server.grammar.test_schema_collection
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import validator_for

from batcher.grammar import GrammarError
from server.grammar.compiler import Vocabulary, compile_grammar
from server.grammar.forms import Grammar, schema_grammar
from tests.server.grammar.test_matcher import walk

BYTES = Vocabulary.of_bytes()
COLLECTION = json.loads((Path(__file__).parent / "schema_collection.json").read_text())
NUM_DRAWN = 3
MOST_TOKENS = 1500


def served(schema: Any) -> Grammar:
    made = schema_grammar(schema)
    compile_grammar(made.text, BYTES)
    return made


def drawn(grammar: str) -> list[Any]:
    """Instances from walks that came to their end."""
    walks = [walk(grammar, np.random.default_rng(seed), MOST_TOKENS) for seed in range(NUM_DRAWN)]
    return [json.loads(text) for text, is_whole in walks if is_whole]


def errors(schema: Any, instance: Any) -> list[ValidationError]:
    kind = validator_for(schema, default=Draft202012Validator)
    return list(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(instance))


def keywords(error: ValidationError) -> Iterator[str]:
    """The keywords on the way to what is wrong, in all alternatives. The path leaves `if` out."""
    for step in error.absolute_schema_path:
        yield "if" if step in ("then", "else") else str(step)
    for inner in error.context or ():
        yield from keywords(inner)


@pytest.mark.parametrize("entry", COLLECTION, ids=lambda entry: entry["name"])
def test_a_schema_is_served_and_its_instances_are_valid_or_it_is_refused_in_words(entry: dict[str, Any]) -> None:
    if words := entry.get("refused"):
        with pytest.raises(GrammarError) as caught:
            served(entry["schema"])
        assert words in str(caught.value)
        return
    made = served(entry["schema"])
    unenforced = set(made.unenforced)
    assert sorted(unenforced) == entry.get("unenforced", [])
    instances = drawn(made.text)
    assert instances
    wrong = [error for instance in instances for error in errors(entry["schema"], instance)]
    assert [error for error in wrong if unenforced.isdisjoint(keywords(error))] == []


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.1%})"


def main() -> None:
    grammars = [(each["schema"], served(each["schema"])) for each in COLLECTION if "refused" not in each]
    valid = [not any(errors(schema, instance) for instance in drawn(made.text)) for schema, made in grammars]
    print("schemas served:", share(len(grammars), len(COLLECTION)))
    print("of these held whole:", share(sum(not made.unenforced for _, made in grammars), len(grammars)))
    print("of these with valid instances only:", share(sum(valid), len(grammars)))


if __name__ == "__main__":
    main()
