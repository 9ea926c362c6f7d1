"""Templates in processes of their own: what one of them does ends no other work, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from server.text import template_runner
from server.text.special_tokens import Part
from server.text.template_messages import TemplateError
from server.text.template_runner import (
    MAX_WAITING,
    Lane,
    ServedTemplate,
    TemplateLimitError,
    TemplateRunner,
    TooManyTemplatesError,
)
from server.text.tokenizer import ByteLevelTokenizer
from tests.server.support.requests import wait_until
from tests.server.support.tokenizers import byte_tokenizer

TOKENIZER = ByteLevelTokenizer(byte_tokenizer(), config={}, chat_template=None)
HELLO = [{"role": "user", "content": "hi<|eot_id|>"}]
SHOWN = (len("hi<|eot_id|><|eot_id|>"), [Part("hi<|eot_id|>", False), Part("<|eot_id|>", True)])
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


OTHERS: set[psutil.Process] = set()  # children that other tests have left to this process


@pytest.fixture
def runner() -> Iterator[TemplateRunner]:
    gc.collect()
    own = psutil.Process()
    num_fds = own.num_fds()
    OTHERS.update(own.children(recursive=True))
    runner = TemplateRunner()
    yield runner
    runner.close()
    assert set(own.children(recursive=True)) <= OTHERS
    assert own.num_fds() <= num_fds


def template(runner: TemplateRunner, source: str = "{{ messages[0].content }}<|eot_id|>", timeout_s: float = 30.0):
    return ServedTemplate(source, TOKENIZER, runner, timeout_s=timeout_s)


def render(served: ServedTemplate, messages=HELLO, max_chars: int = 1000, **extra):
    return served.render(max_chars, messages=messages, extra=extra)


def processes() -> set[psutil.Process]:
    return set(filter(runs_templates, psutil.Process().children())) - OTHERS


def runs_templates(process: psutil.Process) -> bool:
    try:
        return "server.text.template_process" in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def is_at_work(process: psutil.Process) -> bool:
    try:
        return process.cpu_times().user > 0.3
    except psutil.Error:
        return False


def test_one_process_renders_all_and_stays(runner):
    served = template(runner)
    started = processes()
    assert [render(served) for _ in range(3)] == [SHOWN] * 3
    assert len(started) == 1 and processes() == started
    assert not served.reads("tools")
    assert template(runner, "{{ tools }}{{ documents }}").reads("documents")


def test_a_rendering_that_is_too_long_is_counted(runner):
    assert render(template(runner, "{{ 'a' * 5000 }}"), max_chars=4999) == (5000, [])


@pytest.mark.parametrize("source", ["{% if %}", "{{ raise_exception('no') }}", "{{ '\\ud800' }}", "{{ 1 / 0 }}"])
def test_a_template_that_refuses_keeps_its_process(runner, source):
    with pytest.raises(TemplateError):
        render(template(runner, source))
    (process,) = processes()
    assert render(template(runner))[1] == SHOWN[1]
    assert processes() == {process}


MEMORY = {
    "centred": "{{ 'a' | center(300000000000) }}",
    "centred in reach": "{{ 'a' | center(3000000000) }}",
    "formatted": "{{ '%3000000000d' % 1 }}",
    "indented": "{{ [[[1]]] | tojson(indent=3000000000) }}",
    "doubled": "{% set ns = namespace(a='a') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "a list": "{{ [1] * 3000000000 }}",
    "joined": "{{ ('a' * 10000000) | join('b' * 100) }}",
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_bounded(runner, name):
    with pytest.raises(TemplateLimitError, match="more memory than a conversation may take"):
        render(template(runner, MEMORY[name]))
    assert render(template(runner))[1] == SHOWN[1]
    assert len(processes()) == 1


TIME = {
    "a loop": ENDLESS,
    "a power": "{{ 10 ** (10 ** 10) }}",  # one call into C, when it is compiled
    "a power of a variable": "{{ (messages | length + 9) ** (10 ** 10) }}",
    "nested lists": "{% set ns = namespace(a=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
    "{{ ns.a }}",
    "a search": "{{ ('a' * 20000000).count('a' * 9999999 ~ 'b') }}{% for i in range(99999) %}"
    "{{ ('a' * 2000000).split('a') | length }}{% endfor %}",
}


@pytest.mark.parametrize("name", TIME)
def test_time_is_bounded(runner, name):
    with pytest.raises(TemplateLimitError, match=r"longer than 0\.5 s"):
        render(template(runner, TIME[name], timeout_s=0.5))
    assert render(template(runner))[1] == SHOWN[1]


def test_a_long_conversation_may_take_memory(runner):
    """Each character of the two may take four bytes, in each of the renderings."""
    text = "🙂" + "語 word <x>" * 400_000
    long = [{"role": "user", "content": text}]
    num_chars, parts = render(
        template(runner, "{{ messages[0].content | replace('<x>', '') }} <|eot_id|>"), long, 10**8
    )
    assert num_chars == len(text.replace("<x>", "")) + 11
    assert parts[-1] == Part("<|eot_id|>", True)


def test_a_process_that_is_killed_while_it_is_idle_is_replaced(runner):
    served = template(runner)
    (process,) = processes()
    process.kill()
    assert render(served)[1] == SHOWN[1]
    wait_until(lambda: not process.is_running())


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_is_killed_at_work_is_replaced_once(runner, signal_number):
    served = template(runner, ENDLESS)
    killed: set[psutil.Process] = set()
    with ThreadPoolExecutor(1) as thread:
        rendering = thread.submit(render, served)
        for number in (1, 2):
            wait_until(lambda: any(map(is_at_work, processes() - killed)))
            (process,) = processes() - killed
            process.send_signal(signal_number)
            killed.add(process)
            assert len(killed) == number
        with pytest.raises(TemplateLimitError, match=rf"has ended its process \(-{signal_number.value}\)"):
            rendering.result(30)
    assert render(template(runner))[1] == SHOWN[1]


def test_a_process_that_hangs_is_killed(runner):
    served = template(runner, timeout_s=0.5)
    (process,) = processes()
    process.suspend()
    with pytest.raises(TemplateLimitError, match=r"longer than 0\.5 s"):
        render(served, [{"role": "user", "content": "a" * 10**7}])
    assert not process.is_running()
    assert render(template(runner))[1] == SHOWN[1]


def test_it_has_no_descriptors_and_no_secrets(runner, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        template(runner)
        (process,) = processes()
        assert "API_KEY" not in process.environ() and process.environ()["TZ"] == "Asia/Tokyo"
        targets = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
        assert {target.partition(":")[0] for target in targets} == {"socket", "/dev/null"}
        assert len(targets) == 2
        assert process.rlimit(resource.RLIMIT_CORE) == (0, 0)
        assert os.getpgid(process.pid) != os.getpgid(0)
        mapped = {Path(mapping.path).name for mapping in process.memory_maps()}
        assert not any(name.startswith(("jaxlib", "xla", "tokenizers")) for name in mapped)
    finally:
        os.close(read)
        os.close(write)


def test_a_process_that_is_killed_at_its_start_is_replaced(runner, monkeypatch, tmp_path):
    served = template(runner)
    for process in processes():
        process.kill()
        process.wait()
    first = tmp_path / "first"  # a program that ends at once the first time, as one that was killed
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\n[ -e {first} ] || {{ : >{first}; kill -9 $$; }}\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr(template_runner.sys, "executable", str(program))
    assert render(served) == SHOWN
    assert first.exists()


def test_where_no_process_can_be_started_it_says_so(runner, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        template(runner)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ChildProcessError, match="exit code 1"):
        template(runner)
    monkeypatch.undo()
    assert render(template(runner))[1] == SHOWN[1]


def test_waiting_jobs_are_counted_and_slow_ones_delay_no_others(runner):
    ordinary, slow = template(runner), template(runner, ENDLESS, timeout_s=3.0)

    async def all_at_once() -> None:
        special = [runner.in_thread(Lane.SPECIAL, lambda: render(slow)) for _ in range(MAX_WAITING[Lane.SPECIAL])]
        waiting = [asyncio.ensure_future(one) for one in special]
        await asyncio.sleep(0)
        with pytest.raises(TooManyTemplatesError):
            await runner.in_thread(Lane.SPECIAL, lambda: render(slow))
        shown = await asyncio.gather(*(runner.in_thread(Lane.ORDINARY, lambda: render(ordinary)) for _ in range(200)))
        assert all(parts == SHOWN[1] for _, parts in shown)
        assert len(processes()) <= sum(template_runner.NUM_THREADS.values())
        assert not waiting[-1].done()
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (await runner.in_thread(Lane.SPECIAL, lambda: render(ordinary)))[1] == SHOWN[1]

    asyncio.run(all_at_once())


def test_the_end_of_the_runner_ends_what_runs(runner):
    served = template(runner, ENDLESS, timeout_s=600.0)
    with ThreadPoolExecutor(1) as thread:
        rendering = thread.submit(render, served)
        wait_until(lambda: any(map(is_at_work, processes())))
        runner.close()
        with pytest.raises(TemplateLimitError):
            rendering.result(30)
    assert processes() == set()
