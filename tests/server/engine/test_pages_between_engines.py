"""Pages from one engine to another over real sockets."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from batcher.page_store import KeptPage, NoPage, PageSource
from server.engine.curve import Keys, as_client, as_server
from server.engine.fetched_pages import MOST_ENGINES, FetchedPages
from server.engine.page_server import INDEX, TOKEN_BYTES, WINDOW, PageServer
from tests.examples import examples
from tests.server.support.zmtp import MOST_FLOODED, flood

TOKEN, PAGE_BYTES, NUM_PAGES = bytes(range(TOKEN_BYTES)), 5000, 30
LONG_S = 60.0
KEY = Keys.derived("a", "b").public.decode()
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Keeper:
    """An engine with one prompt. `change` makes of each answer another one."""

    def __init__(self) -> None:
        self.pages = [
            np.random.default_rng(number).integers(0, 256, PAGE_BYTES, np.uint8) for number in range(NUM_PAGES)
        ]
        self.asked: list[tuple[bytes, int]] = []
        self.dropped = threading.Event()
        self.change: Callable[[int, KeptPage], KeptPage | NoPage] = lambda number, page: page

    def kept_page(self, token: bytes, index: int) -> KeptPage | NoPage:
        self.asked.append((token, index))
        if token != TOKEN or index >= NUM_PAGES:
            return NoPage.NEVER
        page = self.pages[index]
        return self.change(index, KeptPage(tokens_of(index), xxh3_64_intdigest(page), page))

    def drop_kept(self, token: bytes) -> None:
        if token == TOKEN:
            self.dropped.set()


def tokens_of(number: int) -> bytes:
    return b"%016d" % number


def digest_of(number: int) -> bytes:
    return b"%d" % number


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def server(keeper) -> Iterator[PageServer]:
    with closing(PageServer(keeper, "127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def fetched() -> Iterator[FetchedPages]:
    with closing(FetchedPages(PAGE_BYTES, page_s=LONG_S)) as pages:
        yield pages


class Liar:
    """A page server's socket without its engine."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        keys = Keys.drawn()
        as_server(self.socket, keys)
        self.port, self.key = self.socket.bind_to_random_port("tcp://127.0.0.1"), keys.public.decode()


def source(server: PageServer | Liar, token: bytes = TOKEN, keep_s: float = LONG_S) -> PageSource:
    return PageSource(address=f"tcp://127.0.0.1:{server.port}", key=server.key, token=token, keep_s=keep_s)


def expect_all(pages: FetchedPages, server: PageServer | Liar, **of_source: object) -> None:
    pages.expect([digest_of(number) for number in range(NUM_PAGES)], source(server, **of_source))


def loaded(pages: FetchedPages, number: int) -> np.ndarray | None:
    page = np.zeros(PAGE_BYTES, np.uint8)
    return page if pages.load(digest_of(number), tokens_of(number), page) else None


def test_a_prompt_arrives_page_by_page_and_is_kept_no_longer(keeper, server, fetched) -> None:
    expect_all(fetched, server)
    for number in range(NUM_PAGES):
        assert fetched.has(digest_of(number))
        np.testing.assert_array_equal(loaded(fetched, number), keeper.pages[number])
        assert not fetched.has(digest_of(number))
    assert fetched.num_pages == NUM_PAGES
    assert len(keeper.asked) == NUM_PAGES  # none was asked for twice
    assert keeper.dropped.wait(LONG_S)


def test_without_the_token_there_is_nothing(keeper, server, fetched) -> None:
    expect_all(fetched, server, token=bytes(TOKEN_BYTES))
    assert loaded(fetched, 0) is None
    assert not fetched.has(digest_of(1))
    assert fetched.num_failed == 1


def test_a_page_that_is_on_its_way_to_the_host_is_waited_for(keeper, server, fetched) -> None:
    looks = itertools.count()
    keeper.change = lambda number, page: NoPage.NOT_YET if number == 2 and next(looks) < 20 else page
    expect_all(fetched, server)
    for number in range(NUM_PAGES):
        np.testing.assert_array_equal(loaded(fetched, number), keeper.pages[number])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda page: NoPage.NEVER, "not kept there any more"),
        (lambda page: page._replace(checksum=page.checksum ^ 1), "damaged"),
        (lambda page: page._replace(tokens=tokens_of(999)), "other tokens"),
        (lambda page: page._replace(page=page.page[:-1]), "another form"),
    ],
)
def test_what_follows_a_bad_page_is_not_expected_any_more(keeper, server, fetched, caplog, change, words) -> None:
    keeper.change = lambda number, page: change(page) if number == 3 else page
    expect_all(fetched, server)
    assert [loaded(fetched, number) is not None for number in range(6)] == [True] * 3 + [False] * 3
    assert fetched.num_failed == 1
    assert keeper.dropped.wait(LONG_S)


def test_an_engine_that_is_silent_is_not_waited_for_twice(keeper) -> None:
    with zmq.Context() as context, closing(FetchedPages(PAGE_BYTES, page_s=0.5)) as pages:
        silent = Liar(context)
        with silent.socket:
            expect_all(pages, silent)
            pages.expect([b"of another prompt"], source(silent, token=b"another"))
            assert loaded(pages, 0) is None
            assert not pages.has(b"of another prompt")
        with closing(PageServer(keeper, "127.0.0.1", 0)) as server:  # it has come back
            expect_all(pages, server)
            assert loaded(pages, 0) is not None


@pytest.mark.parametrize(
    ("address", "key"),
    [
        *[(address, KEY) for address in ("tcp://127.0.0.1:0", "tcp://127.0.0.1:99999", "tcp://:1", "nonsense", "")],
        ("tcp://[:1", KEY),
        *[("tcp://127.0.0.1:1", key) for key in ("", "short", "é" * 20, "\0" * 40)],
    ],
)
def test_an_address_or_a_key_that_is_none_gives_nothing(address, key) -> None:
    with closing(FetchedPages(PAGE_BYTES, page_s=0.05)) as pages:
        pages.expect([digest_of(0)], PageSource(address=address, key=key, token=TOKEN, keep_s=LONG_S))
        assert loaded(pages, 0) is None
        assert pages.num_failed == 1


def test_two_prompts_of_one_engine_do_not_mix(keeper, server, fetched) -> None:
    other = bytes(reversed(TOKEN))
    keeper.kept_page = lambda token, index: KeptPage(  # type: ignore[method-assign]
        tokens_of(index), xxh3_64_intdigest(token * 4), np.frombuffer(token * 4, np.uint8)
    )
    with closing(FetchedPages(4 * TOKEN_BYTES, page_s=LONG_S)) as pages:
        for token in (TOKEN, other):
            pages.expect([token + digest_of(number) for number in range(20)], source(server, token))
        page = np.zeros(4 * TOKEN_BYTES, np.uint8)
        for number, token in itertools.product(range(20), (TOKEN, other)):
            assert pages.load(token + digest_of(number), tokens_of(number), page)
            assert page.tobytes() == token * 4


def test_a_page_that_is_expected_already_is_fetched_from_where_it_was_first(keeper, server, fetched) -> None:
    expect_all(fetched, server)
    fetched.expect([digest_of(0), b"of the other prompt alone"], source(server, bytes(TOKEN_BYTES)))
    assert loaded(fetched, 0) is not None
    assert keeper.asked[0] == (TOKEN, 0)
    assert fetched.has(b"of the other prompt alone")


def test_prompts_that_are_kept_no_longer_are_forgotten() -> None:
    now = 0.0
    nobody = SimpleNamespace(port=1, key=KEY)
    with closing(FetchedPages(PAGE_BYTES, clock=lambda: now)) as pages:
        expect_all(pages, nobody, keep_s=5)
        now = 5.0
        pages.expect([b"newer"], source(nobody, b"newer"))
        assert not pages.has(digest_of(0))
        assert pages.has(b"newer")
        pages.clear()
        assert not pages.has(b"newer")


def test_a_port_that_is_taken_is_refused_in_words(keeper, server) -> None:
    with pytest.raises(ValueError, match=f"--kv-port {server.port}"):
        PageServer(keeper, "127.0.0.1", server.port)


@settings(max_examples=examples(20))
@given(st.lists(st.lists(st.binary(max_size=40), max_size=4), max_size=10))
def test_whatever_is_sent_the_server_goes_on(messages: list[list[bytes]]) -> None:
    keeper = Keeper()
    with closing(PageServer(keeper, "127.0.0.1", 0)) as server, zmq.Context() as context:
        with context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            as_client(peer, Keys.drawn(), server.key.encode())
            peer.connect(f"tcp://127.0.0.1:{server.port}")
            for message in messages:
                peer.send_multipart(message or [b""])
        with closing(FetchedPages(PAGE_BYTES, page_s=LONG_S)) as pages:
            expect_all(pages, server)
            assert loaded(pages, 0) is not None


@settings(max_examples=examples(20))
@given(st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=6), max_size=10))
def test_whatever_is_answered_the_reader_goes_on(answers: list[list[bytes]]) -> None:
    with zmq.Context() as context:
        liar = Liar(context)

        def answer() -> None:
            peer = liar.socket.recv_multipart()[0]
            for frames in answers:
                liar.socket.send_multipart([peer, *frames])
            liar.socket.send_multipart([peer, TOKEN, bytes(4)])

        thread = threading.Thread(target=answer)
        thread.start()
        with closing(FetchedPages(PAGE_BYTES, page_s=LONG_S)) as pages:
            expect_all(pages, liar)
            assert loaded(pages, 0) is None
        thread.join()
        liar.socket.close()


def talk(liar: Liar, answer: Callable[[bytes, bytes], list[bytes]], talking: threading.Event) -> None:
    """Answers the first question until `talking` is cleared, with other frames each time."""
    peer, token, index = liar.socket.recv_multipart()
    for number in itertools.count(1):
        if not talking.is_set():
            return
        with contextlib.suppress(zmq.ZMQError):  # the reader has left
            liar.socket.send_multipart([peer, *answer(token, INDEX.pack(number + INDEX.unpack(index)[0]))])


@pytest.mark.parametrize(
    "answer",
    [lambda token, index: [b"nothing"], lambda token, index: [token, INDEX.pack(WINDOW + INDEX.unpack(index)[0])]],
    ids=["of no prompt", "of pages that were not asked for"],
)
def test_an_engine_that_goes_on_talking_is_given_up_and_nothing_of_it_is_kept(keeper, answer) -> None:
    with zmq.Context() as context, closing(FetchedPages(PAGE_BYTES, page_s=0.5)) as pages:
        liar, talking = Liar(context), threading.Event()
        liar.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        liar.socket.setsockopt(zmq.SNDTIMEO, 10)
        talking.set()
        expect_all(pages, liar)
        prompt = pages._prompts[TOKEN]
        thread = threading.Thread(target=talk, args=(liar, answer, talking))
        thread.start()
        loading = threading.Thread(target=loaded, args=(pages, 0), daemon=True)
        loading.start()
        loading.join(LONG_S)
        talking.clear()
        thread.join()
        liar.socket.close()
        assert not loading.is_alive()
        assert pages.num_failed == 1 and not prompt.arrived
        assert not pages.has(digest_of(1))
        with closing(PageServer(keeper, "127.0.0.1", 0)) as honest:
            expect_all(pages, honest)
            assert loaded(pages, 0) is not None


def test_a_page_is_not_waited_for_beyond_the_time_that_it_is_kept() -> None:
    with zmq.Context() as context, closing(FetchedPages(PAGE_BYTES, page_s=LONG_S)) as pages:
        silent = Liar(context)
        expect_all(pages, silent, keep_s=0.2)
        loading = threading.Thread(target=loaded, args=(pages, 0), daemon=True)
        loading.start()
        loading.join(LONG_S / 2)
        assert not loading.is_alive()
        silent.socket.close()


def test_connections_to_many_engines_do_not_stay(keeper, fetched) -> None:
    """As a peer would cause them that answers with other ports and keys. Here one engine has many addresses."""
    with closing(PageServer(keeper, "0.0.0.0", 0)) as server:
        for number in range(2 * MOST_ENGINES):
            address, token = f"tcp://127.0.0.{1 + number}:{server.port}", TOKEN
            fetched.expect([digest_of(0)], PageSource(address=address, key=server.key, token=token, keep_s=LONG_S))
            assert loaded(fetched, 0) is not None
        assert len(fetched._sockets) <= MOST_ENGINES


def test_a_stranger_without_the_key_gets_no_answer(server) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain, context.socket(zmq.DEALER) as guessing:
        as_client(guessing, Keys.drawn(), Keys.drawn().public)
        for stranger in (plain, guessing):
            stranger.setsockopt(zmq.LINGER, 0)
            events = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
            stranger.connect(f"tcp://127.0.0.1:{server.port}")
            stranger.send_multipart([TOKEN, INDEX.pack(0)])
            assert events.poll(30_000)
            assert not stranger.poll(0)
            stranger.disable_monitor()
            events.close()


@pytest.mark.parametrize("mechanism", [b"NULL", b"CURVE"])
def test_a_message_without_an_end_is_cut(keeper, server, fetched, mechanism) -> None:
    assert flood(server.port, b"DEALER", mechanism) < MOST_FLOODED
    expect_all(fetched, server)
    assert loaded(fetched, 0) is not None
