"""Serves minutes of mixed traffic and attacks, and checks that nothing is left behind.

    python -m scripts.soak [--seconds 600] [-- FLAGS OF scripts/serve]

Starts a server on this machine, and waits until it has compiled all of its programs. Ordinary clients send greedy
requests whose answers are known: chats, structured output and tool calls, streamed and whole, and embeddings.
Attackers run `benchmarks/load/attacks.py`. At the end no request may run, no page may be used, no program may have
been compiled, and the memory of both processes must not have grown. The log must have only the warnings that the
attacks provoke. If one of these conditions fails, the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from scripts.benchmarks.load.attacks import ATTACKS, Attack, Victim
from scripts.benchmarks.load.questions import CONSTRAINED, TEXTS, TEXTS_TO_EMBED, Answer, Question, ask, same

ROOT = Path(__file__).parent.parent
START_S = 600.0
IDLE_S = 60.0  # for requests that still run at the end
SAMPLE_S = 2.0  # between two readings of the memory
# Growth of a process's memory from the second quarter to the last. In a short run caches still fill in these quarters.
GROWTH_MIB = 6
SHORT_S, SHORT_GROWTH_MIB = 100.0, 24
# Lines at WARNING or above that attacks provoke.
PROVOKED = re.compile(r"WARNING pallas_serve: 400 to ")
_SEVERE = re.compile(r" (WARNING|ERROR|CRITICAL) |Traceback")


@dataclass
class Account:
    """The record of a run."""

    answers: Counter[str] = field(default_factory=Counter)
    attacks: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)  # seconds that GET /health took
    memory: dict[str, list[int]] = field(default_factory=lambda: {"http": [], "engine": []})  # bytes


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


async def attacker(victim: Victim, account: Account, random: Random, until: float) -> None:
    """Attacks the server until `until`, one random attack after the other."""
    while time.monotonic() < until:
        attack: Attack = random.choice(ATTACKS)
        name = attack.__name__
        try:
            await attack(victim, random)
            account.attacks[name] += 1
        except (AssertionError, TimeoutError, OSError) as error:
            account.problems.append(f"{name}: {error!r}")


async def canary(session: aiohttp.ClientSession, account: Account, until: float) -> None:
    """Requests /health repeatedly, to measure how long other clients wait."""
    while time.monotonic() < until:
        started = time.perf_counter()
        async with session.get("/health") as response:
            await response.read()
        account.health_s.append(time.perf_counter() - started)
        await asyncio.sleep(0.05)


async def watch_memory(server: psutil.Process, account: Account, until: float) -> None:
    """Notes the memory of both processes, in bytes, every SAMPLE_S seconds until `until`."""
    while time.monotonic() < until:
        engine = max((child.memory_info().rss for child in server.children(recursive=True)), default=0)
        account.memory["http"].append(server.memory_info().rss)
        account.memory["engine"].append(engine)
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


async def settle(session: aiohttp.ClientSession, account: Account) -> None:
    """Waits until the engine is idle, and notes what it has not let go of."""
    deadline = time.monotonic() + IDLE_S
    wanted = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
    while True:
        now = await metrics(session)
        left = {name: now[name] for name, value in wanted.items() if now[name] != value}
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
    victim = Victim(host=host, port=int(port), model=model)
    account = Account()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        await compiled_all(session)
        questions = [*TEXTS, *CONSTRAINED, *(TEXTS_TO_EMBED if args.embeddings else [])]
        expected = [(question, await ask(session, question, model, stream=False)) for question in questions]
        until = time.monotonic() + args.seconds
        async with asyncio.TaskGroup() as group:
            for i in range(args.clients):
                group.create_task(ordinary_client(session, model, expected, account, Random(i), until))
            for i in range(args.attackers):
                group.create_task(attacker(victim, account, Random(1000 + i), until))
            group.create_task(canary(session, account, until))
            group.create_task(watch_memory(server, account, until))
        await settle(session, account)
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
    p = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__.splitlines()[0], allow_abbrev=False)
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
    command = [sys.executable, "-m", "scripts.launch", "--port", "0", "--max-model-len", "512", *args.flags]
    if args.embeddings:
        command.append("--enable-embeddings")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
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
        check_memory(account, args.seconds)
        check_log(log, account)
    print(report(account))
    return 1 if account.problems else 0


if __name__ == "__main__":
    sys.exit(main())
