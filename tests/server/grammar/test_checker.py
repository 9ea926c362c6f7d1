"""Grammars are checked in threads: their verdicts are remembered, and a slow one is given up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from server.grammar.checker import CACHE_SIZE, MAX_WAITING, GrammarChecker
from server.grammar.forms import Grammar, regex_grammar, schema_grammar
from server.http.request_error import RequestError


def test_a_fault_is_a_400_that_names_the_field_every_time() -> None:
    async def check() -> None:
        checker = GrammarChecker()
        await checker.check(regex_grammar("a+"), param="guided_regex")
        for _ in range(2):
            with pytest.raises(RequestError, match=r"guided_regex: .*unclosed group") as caught:
                await checker.check(regex_grammar("("), param="guided_regex")
            assert (caught.value.status, caught.value.param) == (400, "guided_regex")

    asyncio.run(check())


def test_the_part_with_the_fault_is_named() -> None:
    async def check() -> None:
        checker = GrammarChecker()
        good, bad = regex_grammar("a"), regex_grammar("(")
        await checker.check(good, param="x", parts=[("a", bad)])
        assert len(checker.verdicts) == 1  # the parts are not compiled
        for parts, param in (([("a", good), ("b", bad)], "b"), ([("a", good)], "x"), ([("a", bad), ("b", bad)], "a")):
            with pytest.raises(RequestError, match=f"{param}: .*unclosed group") as caught:
                await checker.check(regex_grammar("((" if param == "x" else "("), param="x", parts=parts)
            assert caught.value.param == param

    asyncio.run(check())


def test_a_form_that_cannot_be_made_is_a_400() -> None:
    async def make() -> None:
        checker = GrammarChecker()
        made = await checker.make(lambda: schema_grammar({"type": "integer"}), param="response_format")
        assert "integer" in made.text
        with pytest.raises(RequestError, match="response_format: nothing is valid"):
            await checker.make(lambda: schema_grammar(False), param="response_format")

    asyncio.run(make())


def test_the_cache_of_verdicts_is_bounded() -> None:
    async def check() -> None:
        checker = GrammarChecker()
        for i in range(CACHE_SIZE + 5):
            await checker.check(regex_grammar(f"a{i}"), param="x")
        assert len(checker.verdicts) == CACHE_SIZE

    asyncio.run(check())


def test_what_takes_too_long_is_given_up_and_the_loop_goes_on() -> None:
    release = threading.Event()

    async def check() -> None:
        checker = GrammarChecker(timeout_s=0.05)
        with pytest.raises(RequestError, match=r"x: it takes longer than 0\.05 s") as caught:
            await checker.make(lambda: Grammar(str(release.wait(60))), param="x")
        assert caught.value.status == 400
        release.set()

    asyncio.run(check())


def test_a_flood_of_grammars_is_answered_429() -> None:
    release = threading.Event()

    def blocked() -> Grammar:
        release.wait(60)
        return Grammar(regex_grammar("a"))

    async def check() -> None:
        checker = GrammarChecker()
        waiting = [asyncio.create_task(checker.make(blocked, param="x")) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)  # all of them have begun
        with pytest.raises(RequestError) as caught:
            await checker.make(blocked, param="x")
        assert caught.value.status == 429
        release.set()
        await asyncio.gather(*waiting)

    asyncio.run(check())
