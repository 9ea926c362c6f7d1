"""Which engine a request goes to."""

from __future__ import annotations

from server.engine.routing import BLOCK_TOKENS, MOST_AHEAD, MOST_BLOCKS, Router
from server.shared_counts import NUM_WORDS, PrefixTable, SharedCounts

SYSTEM = list(range(3 * BLOCK_TOKENS))


def test_an_unknown_prompt_goes_to_the_least_loaded():
    assert Router().choose(SYSTEM, 0, [3, 1, 2]) == 1


def test_the_next_turn_of_a_chat_goes_where_the_first_went():
    router = Router()
    assert router.choose(SYSTEM + [1] * 70, 0, [1, 0]) == 1
    assert router.choose(SYSTEM + [2] * 70, 0, [0, 1]) == 1  # the same system prompt
    assert router.choose(SYSTEM + [1] * 200, 0, [0, 5]) == 1
    assert router.choose(SYSTEM + [1] * 200, 7, [0, 5]) == 0  # another salt shares nothing


def test_the_longest_beginning_decides():
    router = Router()
    router.choose(SYSTEM, 0, [0, 1])
    router.choose(SYSTEM + [1] * BLOCK_TOKENS, 0, [MOST_AHEAD + 1, 0])  # the first engine is busy
    assert router.choose(SYSTEM + [1] * 2 * BLOCK_TOKENS, 0, [0, 0]) == 1


def test_a_busy_engine_gets_no_more_of_what_it_knows():
    router = Router()
    router.choose(SYSTEM, 0, [0, 0])
    assert router.choose(SYSTEM, 0, [MOST_AHEAD, 0]) == 0
    assert router.choose(SYSTEM, 0, [MOST_AHEAD + 1, 0]) == 1


def test_short_prompts_count_whole():
    router = Router()
    assert router.choose([1, 2], 0, [1, 0]) == 1
    assert router.choose([1, 2], 0, [0, 1]) == 1
    assert router.choose([1, 2, 3], 0, [0, 1]) == 0


def test_long_prompts_cost_no_more_than_their_beginning():
    class Counted(list):
        most = 0

        def __getitem__(self, key: slice) -> list:
            Counted.most = max(Counted.most, key.stop)
            return super().__getitem__(key)

    Router().choose(Counted(range(10**6)), 0, [0, 0])
    assert Counted.most == MOST_BLOCKS * BLOCK_TOKENS


def test_processes_that_share_their_memory_choose_as_one():
    counts = SharedCounts.made(2, 2, 0)
    first, second = Router(PrefixTable(counts)), Router(PrefixTable(counts))
    assert first.choose(SYSTEM + [1] * 70, 0, [1, 0]) == 1
    assert second.choose(SYSTEM + [1] * 70, 0, [0, 1]) == 1
    assert second.choose(SYSTEM + [1] * 70, 7, [0, 1]) == 0  # another salt
    second.forget()
    assert first.choose(SYSTEM + [1] * 70, 0, [0, 1]) == 0


def test_old_prompts_are_forgotten():
    router = Router()
    router.choose([1], 0, [1, 0])
    for number in range(16 * NUM_WORDS):
        router.choose([2, number], 0, [0, 0])
    assert router.choose([1], 0, [0, 1]) == 0
    router.choose([3], 0, [1, 0])
    router.forget()
    assert router.choose([3], 0, [0, 1]) == 0
