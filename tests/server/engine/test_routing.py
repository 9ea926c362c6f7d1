"""Which engine a request goes to."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine import routing, wire
from server.shared_counts import Load, PrefixTable, SharedCounts
from tests.examples import examples

SYSTEM = list(range(3 * routing.BLOCK_TOKENS))
IDLE = Load(0, 0)


def route(router: routing.Router, prompt: Sequence[int], *loads: Load | int, salt: int = 0) -> routing.Route:
    """A load may be the number of open requests alone."""
    given = {i: load if isinstance(load, Load) else Load(load, 0) for i, load in enumerate(loads)}
    return router.choose(wire.packed(prompt), salt, given)


def choose(router: routing.Router, prompt: Sequence[int], *loads: Load | int, salt: int = 0) -> int:
    return route(router, prompt, *loads, salt=salt).engine


def test_an_unknown_prompt_goes_to_the_least_loaded():
    assert choose(routing.Router(), SYSTEM, 3, 1, 2) == 1


def test_tokens_that_wait_are_a_load():
    assert choose(routing.Router(), SYSTEM, Load(1, 5000), Load(3, 0)) == 1


def test_idle_engines_get_new_prompts_in_turns():
    router = routing.Router()
    assert {choose(router, [number] * 100, 0, 0, 0) for number in range(3)} == {0, 1, 2}


def test_the_next_turn_of_a_chat_goes_where_the_first_went():
    router = routing.Router()
    assert choose(router, SYSTEM + [1] * 70, 1, 0) == 1
    assert choose(router, SYSTEM + [2] * 70, 0, 1) == 1  # the same system prompt
    assert choose(router, SYSTEM + [1] * 200, 0, 5) == 1
    assert choose(router, SYSTEM + [1] * 200, 0, 5, salt=7) == 0  # another salt shares nothing


def test_the_longest_beginning_decides():
    router = routing.Router()
    choose(router, SYSTEM, 0, 1)
    choose(router, SYSTEM + [1] * routing.BLOCK_TOKENS, routing.MOST_AHEAD + 1, 0)  # the first engine is busy
    longer = route(router, SYSTEM + [1] * 2 * routing.BLOCK_TOKENS, 0, 0)
    assert (longer.engine, longer.num_known, longer.num_missing) == (1, 4 * routing.BLOCK_TOKENS, routing.BLOCK_TOKENS)


def test_what_an_engine_knows_is_weighed_against_its_queue():
    def chosen(queued: int) -> int:
        router = routing.Router()
        assert choose(router, SYSTEM, 0, 1) == 0
        return choose(router, SYSTEM, Load(0, queued), IDLE)

    worth = routing.MISSING_WEIGHT * len(SYSTEM)
    assert (chosen(worth - 1), chosen(worth + 1)) == (0, 1)


def test_a_busy_engine_gets_no_more_of_what_it_knows():
    router = routing.Router()
    prompt = list(range(100 * routing.BLOCK_TOKENS))
    choose(router, prompt, 0, 0)
    for least in (0, 1, 30):
        limit = routing.TIMES_LEAST * least + routing.MOST_AHEAD
        assert choose(router, prompt, limit, least) == 0
        assert choose(routing.Router(), prompt, limit + 1, least) == 1


def test_a_system_prompt_that_all_requests_have_is_no_hot_spot():
    router = routing.Router()
    loads = [0, 0, 0]
    for number in range(90):
        loads[choose(router, list(range(2000)) + [number] * 64, *loads)] += 1
    assert max(loads) - min(loads) <= routing.MOST_AHEAD + 1
    assert routing.MISSING_WEIGHT * 64 < routing.REQUEST_TOKENS * (
        routing.MOST_AHEAD + 1
    )  # it is the cost that spreads them


@settings(max_examples=examples(100))
@given(st.data())
def test_no_history_sends_a_request_to_an_engine_beyond_the_bound(data: st.DataObject):
    """Requests come, are answered with any number of cached tokens, and end, in any order."""
    num_engines = data.draw(st.integers(1, 5))
    now = 0.0
    router = routing.Router(clock=lambda: now)
    waiting: list[routing.Route] = []
    loads = [0] * num_engines
    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.sampled_from((0.0, 0.1, 10.0)))
        match data.draw(st.sampled_from(("send", "send", "send", "answer", "end", "forget"))):
            case "send":
                prompt = SYSTEM * data.draw(st.integers(1, 3)) + [data.draw(st.integers(0, 2))] * 64
                queued = [data.draw(st.integers(0, 500)) for _ in loads]
                sent = route(router, prompt, *map(Load, loads, queued))
                assert loads[sent.engine] <= routing.TIMES_LEAST * min(loads) + routing.MOST_AHEAD
                assert 0 <= sent.num_known <= sent.num_prompt == len(prompt)
                loads[sent.engine] += 1
                waiting.append(sent)
            case "answer" if waiting:
                one = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
                router.learn(one, data.draw(st.none() | st.integers(0, one.num_prompt)))
            case "end" if any(loads):
                loads[data.draw(st.sampled_from([e for e, load in enumerate(loads) if load]))] -= 1
            case "forget":
                router.forget()


def test_short_prompts_count_whole():
    router = routing.Router()
    assert choose(router, [1, 2], 1, 0) == 1
    assert choose(router, [1, 2], 0, 0) == 1
    assert choose(router, [1, 2, 3], 0, 1) == 0


def test_long_prompts_are_known_to_a_third_and_cost_few_digests():
    """And what differs behind any of their blocks shares the blocks before."""
    for length in (routing.FINE_TOKENS, routing.FINE_TOKENS + 1, 5000, 32_000, 131_072, 10**6):
        router = routing.Router()
        sent = route(router, range(length), 0, 0)
        ends = [tokens for tokens, _ in sent.beginnings]
        assert len(ends) <= (48 if length <= 131_072 else 56)
        assert length * 2 / 3 <= ends[-1] <= length
        assert route(router, range(length), 0, 0).num_known == ends[-1]
        for end in ends[::7]:
            other = [*range(end), *range(length, 2 * length - end)]
            assert route(router, other, 0, 0).num_known == end


def test_the_work_hardly_grows_with_the_prompt(monkeypatch):
    """The bytes that are hashed are counted."""
    hashed = 0

    class Counted:
        def __init__(self, *args, **kwargs) -> None: ...

        def update(self, data: bytes) -> None:
            nonlocal hashed
            hashed += len(data)

        def copy(self):
            return self

        def digest(self) -> bytes:
            return hashed.to_bytes(8)

    monkeypatch.setattr("server.engine.routing.blake2b", Counted)
    route(routing.Router(), range(131_072), 0, 0)
    assert 4 * routing.FINE_TOKENS <= hashed <= 1.5 * 4 * routing.FINE_TOKENS


def test_what_was_not_found_is_forgotten_with_all_that_was_used_before():
    now = 0.0
    router = routing.Router(clock=lambda: now)
    prompts = [[number] * 300 for number in range(4)]
    for prompt in prompts:  # all on engine 0, in this order
        router.learn(route(router, prompt, 0, 50), 0)
        now += routing.TICK_S
    longer = prompts[0] + [9] * 300
    router.learn(route(router, longer, 0, 50), 0)  # its beginning, which the engine had first, is there no more
    now += routing.TICK_S
    assert [route(router, prompt, 0, 0).num_known for prompt in prompts] == [
        256
    ] * 4  # it came back with the longer one
    router.learn(route(router, prompts[2], 0, 50), 64)  # nearly all of it was evicted
    assert [route(router, prompt, 0, 50).num_known for prompt in prompts] == [256, 0, 256, 256]
    assert route(router, longer, 0, 50).num_known == 576


def test_extensions_of_a_beginning_that_was_evicted_are_forgotten():
    now = 0.0
    router = routing.Router(clock=lambda: now)
    longer = SYSTEM + [1] * 128
    router.learn(route(router, longer, 0, 50), 0)
    now += routing.TICK_S
    router.learn(
        route(router, SYSTEM, 0, 50), len(SYSTEM) - routing.BLOCK_TOKENS
    )  # used later: the end of `longer` was not
    now += routing.TICK_S
    router.learn(route(router, SYSTEM, 0, 50), 0)
    assert route(router, longer, 0, 50).num_known == len(SYSTEM)


def test_a_beginning_that_is_being_computed_is_no_loss_if_it_is_not_found():
    now = 0.0
    router = routing.Router(clock=lambda: now)
    router.learn(route(router, [5] * 300, 0, 50), 0)
    now += routing.TICK_S
    first, second = route(router, SYSTEM, 0, 50), route(router, SYSTEM, 0, 50)
    assert second.num_known == len(SYSTEM)
    router.learn(first, 0)
    router.learn(second, 0)  # both were in one step
    assert route(router, [5] * 300, 0, 50).num_known == 256


def test_full_pages_alone_can_be_found():
    now = 0.0
    router = routing.Router(page_size=128, clock=lambda: now)
    router.learn(route(router, [5] * 300, 0, 50), 0)
    now += routing.TICK_S
    router.learn(route(router, SYSTEM, 0, 50), 0)
    now += routing.TICK_S
    router.learn(route(router, SYSTEM, 0, 50), 128)  # of 192
    assert route(router, [5] * 300, 0, 50).num_known == 256


def test_engines_without_a_prefix_cache_are_chosen_by_their_loads():
    router = routing.Router(page_size=0)
    router.learn(route(router, SYSTEM, 0, 1), 0)
    assert route(router, SYSTEM, 1, 0).engine == 1


def test_processes_that_share_their_memory_choose_as_one():
    counts = SharedCounts.made(2, 2, 0)
    now = 0.0
    first, second = (routing.Router(PrefixTable(counts), clock=lambda: now) for _ in range(2))
    prompt = SYSTEM + [1] * 70
    sent = route(first, prompt, 1, 0)
    assert (sent.engine, choose(second, prompt, 0, 1)) == (1, 1)
    assert choose(second, prompt, 0, 1, salt=7) == 0
    first.learn(sent, 0)
    now += routing.TICK_S
    second.learn(route(second, prompt, 0, 1), 0)  # what the second process has found out, the first knows
    assert route(first, prompt, 50, 0).num_known == 256
    second.forget()
    assert choose(first, prompt, 0, 1) == 0


def test_old_prompts_are_forgotten(monkeypatch):
    """The memory is bounded."""
    monkeypatch.setattr("server.shared_counts.NUM_WORDS", 1 << 10)
    router = routing.Router()
    choose(router, [1], 1, 0)
    for number in range(1 << 12):
        choose(router, [2, number], 0, 0)
    assert choose(router, [1], 0, 1) == 0
    choose(router, [3], 1, 0)
    router.forget()
    assert choose(router, [3], 0, 1) == 0
