"""K/V pages between two processes, over ZeroMQ and by jax.experimental.transfer: speed, and what becomes of faults.

    python -m scripts.lab kv_connectors

Both ways begin with bytes in the giver's host memory and end with copies of pages on the taker's device. `zmq` is what
servers with `--kv-role` do: `PageServer`, `FetchedPages` with its checksums, and then the copy to the device. `jax` has
the giver check the pages, copy them to its device and offer the copy (`await_pull`), and the taker pulls it: no page is
checked again. The two take turns with the same pages, and all bytes are compared after each turn.

The faults are those of `jax` alone. With `zmq` each costs the pages of a prompt and nothing else, which
`tests/server/engine/test_pages_between_engines.py` and `tests/e2e/test_prefill_apart.py` show.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
from xxhash import xxh3_64_intdigest

from batcher.page_store import KeptPage, NoPage, PageSource
from scripts.lab.tables import Table, ratio, say, say_head
from server.engine.fetched_pages import FetchedPages
from server.engine.page_server import TOKEN_BYTES, PageServer

MIB = 1 << 20
TOKEN, TOKENS = bytes(TOKEN_BYTES), b"tokens"
LIMIT_S = 1.0  # that jax.experimental.transfer is given
PATIENCE_S = 4.0  # with what does not keep it


def main(argv: list[str] | None = None) -> int:
    """Prints a row for each way and each fault."""
    parser = argparse.ArgumentParser(prog="python -m scripts.lab kv_connectors", description=__doc__.splitlines()[0])
    parser.add_argument("--page-kib", type=int, default=2048, help="default: 2048, 16 tokens of Llama 3.1 8B")
    parser.add_argument("--pages", type=int, default=64, help="of a prompt (default: 64)")
    parser.add_argument("--rounds", type=int, default=10, help="default: 10, after one that does not count")
    parser.add_argument("--no-faults", action="store_true", help="speeds only")
    args = parser.parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the children, too: a chip belongs to one process
    say_head()
    speeds(args.pages, args.page_kib << 10, args.rounds)
    if not args.no_faults:
        say("")
        table = Table({"fault": "<38", "what becomes of it": ""}, say)
        for probe in FAULTS:
            table.row((probe.__doc__ or "").rstrip("."), probe())
    return 0


# --- speed ---


def speeds(num_pages: int, page_bytes: int, num_rounds: int) -> None:
    """Prints the MB/s of each way: median, least and greatest of the rounds after the first one."""
    seconds: dict[str, list[float]] = {"zmq": [], "jax": []}
    pages, copies = pages_of(num_pages, page_bytes), copies_of(page_bytes)
    with peer(num_pages, page_bytes) as giver, closing(FetchedPages(page_bytes, silence_s=60)) as fetched:
        port = giver.ask("zmq_port")
        connection = transfer_server().connect(giver.ask("jax_address"))
        for round_ in range(num_rounds + 1):
            for way, each in seconds.items():
                started = time.perf_counter()
                taken = (
                    by_zmq(fetched, port, pages, copies) if way == "zmq" else by_jax(connection, giver, pages, copies)
                )
                if round_:
                    each.append(time.perf_counter() - started)
                assert np.array_equal(np.concatenate([*map(bytes_of, taken)])[:num_pages], np.stack(pages))
    table = Table({"": "<8", "MB/s": "6.0f", "least": "6.0f", "greatest": "6.0f"}, say)
    num_mb = num_pages * page_bytes / 1e6
    for way, each in seconds.items():
        table.row(way, num_mb / float(np.median(each)), num_mb / max(each), num_mb / min(each))
    say("")
    say(ratio("MB/s of jax to those of zmq", *(float(np.median(seconds[way])) for way in ("zmq", "jax"))))


def by_zmq(fetched: FetchedPages, port: int, pages: Sequence[np.ndarray], copies: Any) -> list[Any]:
    """As an engine takes pages: while one copy is fetched and checked, the one before it goes to the device."""
    source = PageSource(address=f"tcp://127.0.0.1:{port}", token=TOKEN, keep_s=3600)
    digests = [b"%d" % index for index in range(len(pages))]
    fetched.expect(digests, source)
    buffers = np.empty((2, copies.most, pages[0].nbytes), np.uint8)
    staged: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as stager:
        for number, start in enumerate(range(0, len(pages), copies.most)):
            part = digests[start : start + copies.most]
            if number > 1:
                staged[number - 2].result()  # its buffer is used again
            buffer = buffers[number % 2][: len(part)]
            assert all(fetched.load(digest, TOKENS, page) for digest, page in zip(part, buffer, strict=True))
            staged.append(stager.submit(copies.stage, list(buffer)))
        return [each.result().copy for each in staged]


def by_jax(connection: Any, giver: Peer, pages: Sequence[np.ndarray], copies: Any) -> list[Any]:
    """While one copy is pulled, the giver offers the next one."""
    import jax

    numbers = [int.from_bytes(os.urandom(8)) for _ in range(0, len(pages), copies.most)]
    for index, number in enumerate(numbers[:2]):
        giver.tell("offer_pages", number, index)
    taken = []
    for index, number in enumerate(numbers):
        form = giver.heard()
        copy = connection.pull(number, [array_of(*each) for each in form])
        taken.append(jax.block_until_ready(copy))
        if index + 2 < len(numbers):
            giver.tell("offer_pages", numbers[index + 2], index + 2)
    return taken


# --- faults ---


def nobody_takes() -> str:
    """256 MiB that nobody takes."""
    with peer() as giver:
        before = giver.ask("held")
        giver.ask("offer", 1, 256 * MIB, LIMIT_S)
        time.sleep(LIMIT_S + PATIENCE_S)
        late = giver.ask("held") - before
        giver.ask("offer", 2, 4, LIMIT_S)
        return f"{late} MiB held {PATIENCE_S:g} s after the limit, {giver.ask('held') - before} after the next offer"


def taker_killed() -> str:
    """A taker killed while it pulls 256 MiB."""
    held: list[int] = []
    with peer() as giver:
        address, before = giver.ask("jax_address"), giver.ask("held")
        for number in range(3):
            with peer() as taker:
                taker.ask("held")
                giver.ask("offer", number, 256 * MIB, LIMIT_S)
                taker.tell("pull", address, number, 256 * MIB, None)
                time.sleep(0.3)
            time.sleep(LIMIT_S)
            giver.ask("offer", 100 + number, MIB, 600)
            held.append(giver.ask("held") - before)
        with peer() as taker:
            later = taker.ask("pull", address, 102, MIB, 60)
    return f"{held[0]}, {held[1]}, {held[2]} MiB held after one, two, three of them; another taker's pull: {later}"


def giver_killed() -> str:
    """A giver killed while 256 MiB are pulled."""
    with peer() as giver, peer() as taker:
        giver.ask("offer", 1, 256 * MIB, None)
        taker.ask("held")
        taker.tell("pull", giver.ask("jax_address"), 1, 256 * MIB, None)
        time.sleep(0.3)
        giver.process.kill()
        return str(taker.heard())


def giver_stopped() -> str:
    """A giver that stands still."""
    with peer() as giver, peer() as taker:
        giver.ask("offer", 1, MIB, None)
        address = giver.ask("jax_address")
        os.kill(giver.process.pid or 0, signal.SIGSTOP)
        return str(taker.ask("pull", address, 1, MIB, LIMIT_S))


def giver_gone() -> str:
    """A giver that is not there."""
    with peer() as taker, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(taker.ask("pull", f"127.0.0.1:{free.getsockname()[1]}", 1, MIB, LIMIT_S))


def never_offered() -> str:
    """A number that was never offered."""
    with peer() as giver, peer() as taker:
        return str(taker.ask("pull", giver.ask("jax_address"), 7, MIB, LIMIT_S))


def too_few() -> str:
    """An offer of half the bytes."""
    return other_size(MIB // 2)


def too_many() -> str:
    """An offer of twice the bytes."""
    return other_size(2 * MIB)


def other_size(size: int) -> str:
    """What becomes of a pull of 1 MiB of such an offer."""
    with peer() as giver, peer() as taker:
        giver.ask("offer", 1, size, None)
        return str(taker.ask("pull", giver.ask("jax_address"), 1, MIB, LIMIT_S))


def http_request() -> str:
    """An HTTP request to the giver's port."""
    return after_bytes(b"GET / HTTP/1.1\r\nHost: giver\r\n\r\n")


def four_zeros() -> str:
    """Four zero bytes to the giver's port."""
    return after_bytes(bytes(4))


def after_bytes(sent: bytes) -> str:
    """What becomes of a giver to which a stranger sends this."""
    with peer() as giver:
        host, port = giver.ask("jax_address").rsplit(":", 1)
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(sent)
            giver.process.join(PATIENCE_S)
        return giver.state()


FAULTS: tuple[Callable[[], str], ...] = (
    nobody_takes, taker_killed, giver_killed, giver_stopped, giver_gone, never_offered, too_few, too_many, http_request,
    four_zeros,
)  # fmt: skip


# --- processes ---


class Peer:
    """A child that does what it is told (`work`)."""

    def __init__(self, *pages: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *pages), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, *command: object) -> None:
        """Does not wait for the answer."""
        self._pipe.send(command)

    def heard(self) -> Any:
        """The answer to the oldest command, or how the child has ended."""
        try:
            return self._pipe.recv()
        except EOFError:
            self.process.join()
            return self.state()

    def ask(self, *command: object) -> Any:
        """`tell`, and then `heard`."""
        self.tell(*command)
        return self.heard()

    def state(self) -> str:
        """Whether the child lives, or how it has ended."""
        code = self.process.exitcode
        return "it lives" if code is None else f"it has ended: {signal.Signals(-code).name if code < 0 else code}"


@contextmanager
def peer(*pages: int) -> Iterator[Peer]:
    """A child until the end of the block. `pages`: how many it gives, and the bytes of one."""
    child = Peer(*pages)
    try:
        yield child
    finally:
        child.process.kill()
        child.process.join()


def work(pipe: Connection, num_pages: int = 0, page_bytes: int = 0) -> None:
    """The child: answers commands until it is killed."""
    import jax

    transfers = transfer_server()
    commands: dict[str, Callable[..., object]] = {
        "jax_address": transfers.address,
        "offer": lambda number, size, limit_s: transfers.await_pull(number, jax.numpy.ones(size, "u1"), until(limit_s)),
        "pull": partial(pulled, transfers),
        "held": lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // MIB,
    }
    if num_pages:
        keeper = Keeper(pages_of(num_pages, page_bytes))
        server, copies = PageServer(keeper, "127.0.0.1", 0), copies_of(page_bytes)

        def offer_pages(number: int, index: int) -> list[tuple[tuple[int, ...], str]]:
            kept = keeper.pages[index * copies.most : (index + 1) * copies.most]
            assert all(xxh3_64_intdigest(each.page) == each.checksum for each in kept)
            copy = copies.stage([each.page for each in kept]).copy
            transfers.await_pull(number, copy)
            return [(array.shape, array.dtype.name) for array in copy]

        commands |= {"zmq_port": lambda: server.port, "offer_pages": offer_pages}
    while True:
        name, *arguments = pipe.recv()
        pipe.send(commands[name](*arguments))


def pulled(transfers: Any, address: str, number: int, size: int, limit_s: float | None) -> str:
    """What becomes of a pull, and when."""
    connection, started = transfers.connect(address), time.perf_counter()
    array, is_late, error = connection.pull(number, array_of((size,), "uint8"), until(limit_s)), False, None
    while not array.is_ready():
        if not is_late and time.perf_counter() - started > (60 if limit_s is None else limit_s) + PATIENCE_S:
            is_late = True
            connection._poison_connection()
        time.sleep(0.001)
    try:
        array.block_until_ready()
    except Exception as caught:  # whatever it is is the answer
        error = caught
    if is_late:
        return f"nothing {PATIENCE_S:g} s after the limit of {limit_s:g} s; it ended when its connection was poisoned"
    what = "it came" if error is None else f"{type(error).__name__}, {str(error)[:75]},"
    return f"{what} after {time.perf_counter() - started:.2f} s"


def until(limit_s: float | None) -> datetime | None:
    """A limit as jax.experimental.transfer takes it."""
    return None if limit_s is None else datetime.now(UTC) + timedelta(seconds=limit_s)


def transfer_server() -> Any:
    """One end of jax.experimental.transfer."""
    import jax
    from jax.experimental import transfer

    return transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"] * 2)


# --- pages ---


class Keeper:
    """An engine with one prompt, of which it always keeps the pages: a `page_server.KeepingEngine`."""

    def __init__(self, pages: Sequence[np.ndarray]) -> None:
        self.pages = [KeptPage(TOKENS, xxh3_64_intdigest(page), page) for page in pages]

    def kept_page(self, token: bytes, index: int) -> KeptPage | NoPage:
        """See `Engine`."""
        return self.pages[index]

    def drop_kept(self, token: bytes) -> None:
        """They are for the next round, too."""


def pages_of(count: int, size: int) -> list[np.ndarray]:
    """Pages u8[size], the same in each process."""
    return list(np.random.default_rng(0).integers(0, 256, (count, size), np.uint8))


def copies_of(page_bytes: int) -> Any:
    """The `PageCopies` of a state with such pages."""
    from model.execution.page_copies import PageCopies
    from model.execution.step import DeviceState

    none = cast(Any, None)
    kv = [array_of((1, page_bytes // 4), "uint32")]
    return PageCopies(DeviceState(slots=none, history=none, masks=none, kv=kv), 0)


def array_of(shape: tuple[int, ...], dtype: str) -> Any:
    """Describes an array on this process's device."""
    import jax
    from jax.sharding import SingleDeviceSharding

    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(jax.devices()[0]))


def bytes_of(copy: Any) -> np.ndarray:
    """u8[N, page_bytes]."""
    return np.asarray(copy[0]).reshape(len(copy[0]), -1).view(np.uint8)
