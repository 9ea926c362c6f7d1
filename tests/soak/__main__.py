"""Serves minutes of mixed traffic and attacks, and checks that nothing is left behind.

    python -m tests.soak [--seconds 600] [-- FLAGS OF scripts/serve]

Starts a server on this machine, and waits until it has compiled all of its programs. Ordinary clients send greedy
requests whose answers are known: chats, structured output and tool calls, streamed and whole, and embeddings.
Attackers run `attacks.py` with another API key. At the end no request may run, no page may be used, no
program may have been compiled, and both processes must have as many descriptors as before. Their memory must not have
grown. All child processes must end with the server. The log must have only the warnings that the attacks provoke. If
one of these conditions fails, the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.server.engine.hosts.loopback import free_port
from tests.soak.attacks import ATTACKS, Attack
from tests.soak.questions import CONSTRAINED, TEXTS, TEXTS_TO_EMBED, Answer, Question, ask, same
from tests.soak.victim import Victim

ROOT = Path(__file__).parents[2]
START_S = 600.0
IDLE_S = 60.0  # for requests that still run at the end
SAMPLE_S = 2.0  # between two readings of the memory
# Growth of a process's memory from the second quarter to the last. In a short run these quarters have attacks that
# come for the first time: an allocator keeps some of what each has taken.
GROWTH_MIB = 12
SHORT_S, SHORT_GROWTH_MIB = 300.0, 100
NUM_TEMPLATE_PROCESSES = 3  # children that the server may start when it needs them
ENDING_S = 10.0  # for children, after the server's end
KEY, ATTACKERS_KEY = "ordinary", "attackers"
# Limits that attackers reach in seconds, and the templates of requests, which are attacks as well.
LIMITS = ("--max-model-len=512", "--body-timeout=5", "--max-body-memory=32")
# A page takes memory when it is used for the first time. So few pages are all used within the first quarter.
PAGES = "--num-gpu-blocks-override=256"
FLAGS = ("--port=0", "--trust-request-chat-template", PAGES, *LIMITS)
# Lines at WARNING or above that attacks provoke.
PROVOKED = re.compile(r"WARNING pallas_serve: ((400|408|503) to |structured_outputs: a grammar cannot hold )")
_SEVERE = re.compile(r" (WARNING|ERROR|CRITICAL) |Traceback")


@dataclass
class Account:
    """The record of a run."""

    answers: Counter[str] = field(default_factory=Counter)
    attacks: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)  # seconds that GET /health took
    memory: dict[str, list[int]] = field(default_factory=lambda: {"http": [], "engine": []})  # bytes
    children: set[psutil.Process] = field(default_factory=set)  # all that were seen


@dataclass(frozen=True)
class Processes:
    """The server's processes, after its start."""

    server: psutil.Process
    engine: psutil.Process  # its largest child
    num_children: int

    @classmethod
    def of(cls, server: psutil.Process) -> Processes:
        """Raises ValueError if the server has no child."""
        children = server.children(recursive=True)
        return cls(server, max(children, key=lambda child: child.memory_info().rss), len(children))

    def descriptors(self) -> dict[str, int]:
        """The open descriptors of each process, without the one of the server for each child."""
        own = self.server.num_fds() - len(self.server.children(recursive=True))
        return {"descriptors of the http process": own, "descriptors of the engine": self.engine.num_fds()}

    def left(self, before: dict[str, int]) -> dict[str, int]:
        """What there is more of than at the start; `before` are the descriptors that were open then."""
        left = {name: number - before[name] for name, number in self.descriptors().items() if number > before[name]}
        num_new = len(self.server.children(recursive=True)) - self.num_children
        return left | ({"child processes": num_new} if num_new > NUM_TEMPLATE_PROCESSES else {})


async def ordinary_client(
    session: aiohttp.ClientSession,
    model: str,
    expected: list[tuple[Question, Answer]],
    account: Account,
    random: Random,
    until: float,
) -> None:
    """Asks the questions of `expected` until `until` and compares the answers."""
    while time.monotonic() < until:
        (question, right), stream = random.choice(expected), random.random() < 0.7
        try:
            answer = await ask(session, question, model, stream=stream)
        except (RuntimeError, aiohttp.ClientError) as error:
            account.answers["refused"] += 1
            if "429" not in str(error):
                account.problems.append(f"an ordinary request failed: {error!r}")
            continue
        is_right = same(answer, right)
        account.answers["right" if is_right else "wrong"] += 1
        if not is_right:
            account.problems.append(f"{question} was answered {answer!r}, not {right!r}")


def attacks_in_rounds(random: Random) -> Iterator[Attack]:
    """All attacks in a random order, again and again."""
    while True:
        yield from random.sample(ATTACKS, len(ATTACKS))


async def attacker(victim: Victim, attacks: Iterator[Attack], account: Account, random: Random, until: float) -> None:
    """Attacks the server until `until`. `attacks` are shared by all attackers."""
    while time.monotonic() < until:
        attack = next(attacks)
        name = attack.__name__
        try:
            await attack(victim, random)
            account.attacks[name] += 1
        except (AssertionError, TimeoutError, OSError, ValueError) as error:
            account.problems.append(f"{name}: {error!r}")


async def canary(session: aiohttp.ClientSession, account: Account, until: float) -> None:
    """Requests /health repeatedly, to measure how long other clients wait."""
    while time.monotonic() < until:
        started = time.perf_counter()
        async with session.get("/health") as response:
            await response.read()
        account.health_s.append(time.perf_counter() - started)
        await asyncio.sleep(0.05)


def own_bytes(process: psutil.Process) -> int:
    """The memory that the process has taken for itself, also where it is swapped out. Code and other files, of which
    the system reads and forgets pages as it likes, do not count."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(int(kib) for kib in re.findall(r"^(?:RssAnon|VmSwap):\s*(\d+) kB$", status, re.MULTILINE)) * 1024


async def watch(processes: Processes, account: Account, until: float) -> None:
    """Notes the memory of both processes, in bytes, and the children, every SAMPLE_S seconds until `until`."""
    while time.monotonic() < until:
        account.memory["http"].append(own_bytes(processes.server))
        account.memory["engine"].append(own_bytes(processes.engine))
        account.children.update(processes.server.children(recursive=True))
        await asyncio.sleep(SAMPLE_S)


async def metrics(session: aiohttp.ClientSession) -> dict[str, float]:
    """The samples without labels of their own, by name without the prefix."""
    async with session.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return {
        sample.name.partition(":")[2]: sample.value
        for family in families
        for sample in family.samples
        if sample.labels.keys() <= {"model_name", "engine"}
    }


async def compiled_all(session: aiohttp.ClientSession) -> None:
    """Waits until no program is to come: compiling one takes memory. Raises RuntimeError after START_S."""
    deadline = time.monotonic() + START_S
    while left := (await metrics(session))["num_programs_to_come"]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{left:.0f} programs are not compiled after {START_S:.0f} s")
        await asyncio.sleep(SAMPLE_S)


async def settle(
    session: aiohttp.ClientSession, processes: Processes, before: dict[str, int], account: Account
) -> None:
    """Waits until the server is idle, and notes what it has not let go of. `before`: the descriptors at the start."""
    deadline = time.monotonic() + IDLE_S
    wanted = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
    while True:
        now = await metrics(session)
        left = {name: now[name] for name, value in wanted.items() if now[name] != value} | processes.left(before)
        if not left or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    if left:
        account.problems.append(f"not idle {IDLE_S:.0f} s after the last request: {left}")
    if compiled := now["num_compiles_after_warm_up_total"]:
        account.problems.append(f"{compiled:.0f} programs were compiled while serving")


async def soak(url: str, server: psutil.Process, model: str, args: argparse.Namespace) -> Account:
    """Runs clients and attackers for `args.seconds`. Returns the account of the run, with the problems found."""
    host, _, port = url.removeprefix("http://").partition(":")
    ports = {"port": int(port), "events_port": args.events_port}
    victim = Victim(host=host, **ports, model=model, pid=server.pid, key=ATTACKERS_KEY, other_key=KEY)
    account = Account()
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(url, headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        await compiled_all(session)
        questions = [*TEXTS, *CONSTRAINED, *(TEXTS_TO_EMBED if args.embeddings else [])]
        expected = [(question, await ask(session, question, model, stream=False)) for question in questions]
        processes = Processes.of(server)
        before = processes.descriptors()
        until = time.monotonic() + args.seconds
        async with asyncio.TaskGroup() as group:
            for i in range(args.clients):
                group.create_task(ordinary_client(session, model, expected, account, Random(i), until))
            attacks = attacks_in_rounds(Random(1000))
            for i in range(args.attackers):
                group.create_task(attacker(victim, attacks, account, Random(1001 + i), until))
            group.create_task(canary(session, account, until))
            group.create_task(watch(processes, account, until))
    async with aiohttp.ClientSession(url, headers=headers) as session:
        await settle(session, processes, before, account)
    account.children.update(server.children(recursive=True))
    return account


def in_quarters(samples: list[int]) -> list[list[int]]:
    """Four parts of equal size; the first takes what is left over."""
    size = len(samples) // 4
    ends = [len(samples) - size * i for i in (4, 3, 2, 1, 0)]
    return [samples[0 if i == 0 else ends[i] : ends[i + 1]] for i in range(4)]


def growth_mib(samples: list[int]) -> float:
    """MiB from the median of the second quarter to that of the last quarter."""
    _, second, _, last = in_quarters(samples)
    return (median(last) - median(second)) / 2**20 if second and last else 0.0


def check_memory(account: Account, seconds: float) -> None:
    """Adds a problem for each process that has grown in a run of `seconds`."""
    most = GROWTH_MIB if seconds > SHORT_S else SHORT_GROWTH_MIB
    for name, samples in account.memory.items():
        if (growth := growth_mib(samples)) > most:
            account.problems.append(f"the {name} process grew by {growth:.0f} MiB")


def check_children(account: Account) -> None:
    """Adds a problem for each child process that has not ended with the server."""
    _, alive = psutil.wait_procs(account.children, timeout=ENDING_S)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                account.problems.append(f"a child process is left: {child.cmdline()}")


def check_log(log: Path, account: Account) -> None:
    """Adds a problem for each warning in the log that no attack provokes."""
    for line in log.read_text(errors="replace").splitlines():
        if _SEVERE.search(line) and not PROVOKED.search(line):
            account.problems.append(f"in the log: {line}")


def report(account: Account) -> str:
    """The account in a few lines."""
    health = sorted(account.health_s) or [0.0]
    lines = [
        f"answers: {dict(account.answers)}",
        f"attacks: {dict(sorted(account.attacks.items()))}",
        f"GET /health: median {median(health) * 1000:.1f} ms, worst {health[-1] * 1000:.0f} ms of {len(health)}",
    ]
    for name, samples in account.memory.items():
        quarters = [median(part) / 2**20 for part in in_quarters(samples) if part]
        lines.append(f"{name} process, MiB in each quarter: {', '.join(f'{mib:.0f}' for mib in quarters)}")
    for problem, times in Counter(account.problems).most_common(20):
        lines.append(f"PROBLEM ({times} times): {problem[:500]}")
    lines.append("nothing is left behind" if not account.problems else f"{len(account.problems)} problems")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--seconds", type=float, default=600.0)
    p.add_argument("--clients", type=int, default=6, help="ordinary ones")
    p.add_argument("--attackers", type=int, default=2)
    p.add_argument("--served-model-name", default="demo")
    p.add_argument("--embeddings", action="store_true", help="serve and ask for embeddings, too")
    p.add_argument("flags", nargs="*", metavar="FLAG", help="of scripts/serve, after --")
    return p


def wait_for_url(server: subprocess.Popen[str]) -> str:
    """Reads the server's output up to its address. Raises RuntimeError if the output ends before."""
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"(http://[\w.:]+)/v1", line):
            return found[1]
    raise RuntimeError(f"the server has ended with code {server.wait()} before it was ready")


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    args.events_port = free_port()
    endpoint = f"tcp://*:{args.events_port}"
    events = {"enable_kv_cache_events": True, "endpoint": endpoint, "show_prompts_to_network": True}
    command = [sys.executable, "-m", "scripts.launch", "--api-key", KEY, ATTACKERS_KEY, *FLAGS]
    command += [f"--kv-events-config={json.dumps(events)}", *args.flags]
    if args.embeddings:
        command.append("--enable-embeddings")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command += ["--batch-folder", f"{folder}/batches"]
        with log.open("w") as errors:
            server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            url = wait_for_url(server)
            account = asyncio.run(soak(url, psutil.Process(server.pid), args.served_model_name, args))
            server.terminate()
            if code := server.wait(60):
                account.problems.append(f"the server ended with code {code}")
        except RuntimeError as error:
            print(f"soak: {error}\n{log.read_text()}", file=sys.stderr)
            return 2
        finally:
            server.kill()
            server.communicate()
        check_children(account)
        check_memory(account, args.seconds)
        check_log(log, account)
    print(report(account))
    return 1 if account.problems else 0


if __name__ == "__main__":
    sys.exit(main())
