"""The model's template in threads, and templates of requests in processes: both have bounds, and end."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest

from server.text.chat_template import ChatTemplate
from server.text.special_tokens import Part
from server.text.template_environment import TemplateError, TemplateLengthError, TemplateLimitError
from server.text.template_runner import MAX_WAITING, NUM_PROCESSES, TemplateRunner, TooManyTemplatesError
from server.text.tokenizer import ByteLevelTokenizer
from tests.server.support.tokenizers import byte_tokenizer

TOKENIZER = ByteLevelTokenizer(byte_tokenizer(), config={}, chat_template=None)
HELLO = [{"role": "user", "content": "hi<|eot_id|>"}]
SOURCE = "{{ messages[0].content }}<|eot_id|>"
SHOWN = [Part("hi<|eot_id|>", False), Part("<|eot_id|>", True)]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def runs_templates(process: psutil.Process) -> bool:
    try:
        return "server.text.template_process" in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def processes() -> list[psutil.Process]:
    return list(filter(runs_templates, psutil.Process().children()))


def template(source: str = SOURCE) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=TOKENIZER.special_tokens, variables={})


async def rendered(source: str, messages=HELLO, *, timeout_s: float = 30.0, max_chars: int = 1000, **call):
    """By a process."""
    runner = TemplateRunner(timeout_s=timeout_s)
    return await runner.render_source(source, TOKENIZER, messages=messages, max_chars=max_chars, **call)


async def at_work() -> psutil.Process:
    """The process that renders, which has begun."""
    while True:
        for process in processes():
            if process.cpu_times().user > 0.5:
                return process
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_own", [False, True])
def test_it_renders(is_own):
    async def parts() -> list[Part]:
        if is_own:
            parts, variables = await rendered(SOURCE + "{% if tools %}{% endif %}")
            assert variables == {"messages", "tools"}
            return parts
        return await TemplateRunner(timeout_s=30.0).run(template().render, HELLO)

    assert asyncio.run(parts()) == SHOWN
    assert processes() == []


LONG = {
    "text": "{{ 'a' * 5000 }}",
    "pieces": "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
    "messages by messages": "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", LONG)
def test_a_rendering_has_a_bound(name):
    messages = [{"role": "user", "content": "hello"}] * 200
    with pytest.raises(TemplateLengthError, match="more than 4999 characters"):
        template(LONG[name]).render(messages, max_chars=4999)
    with pytest.raises(TemplateLengthError, match="more than 4999 characters"):
        asyncio.run(rendered(LONG[name], messages, max_chars=4999))


LOOPS = {
    "ranges": ENDLESS,
    "messages": "{% for m in messages %}" * 3 + "{% endfor %}" * 3,
    "in a macro": "{% macro m() %}" + ENDLESS + "{% endmacro %}{{ m() }}",
    "of a condition": "{% for a in range(99999) if range(99999) | list | length == 0 %}{% endfor %}",
    "a macro of itself": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "recursive": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 50 }}{% endfor %}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_loops_of_the_models_template_end_at_the_deadline(name):
    messages = [{"role": "user", "content": ""}] * 5000

    async def render() -> list[Part]:
        runner = TemplateRunner(timeout_s=0.5)
        render = partial(template(LOOPS[name]).render, messages, timeout_s=runner.timeout_s)
        stuck = [asyncio.ensure_future(runner.run(render)) for _ in range(3)]
        num_turns = 0
        while not all(one.done() for one in stuck):
            await asyncio.sleep(0)  # the event loop goes on
            num_turns += 1
        assert num_turns > 20
        for one in stuck:
            with pytest.raises(TemplateLimitError, match=r"longer than 0\.5 s"):
                one.result()
        return await runner.run(template().render, HELLO)

    assert asyncio.run(render()) == SHOWN


def test_loops_have_what_jinja_gives_them():
    """The deadline leaves `loop`, unpacking, filters and `else` as they are."""
    source = (
        "{% for key, value in {'a': 1, 'b': 2}.items() %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ key }}"
        "{{ value }}{{ loop.nextitem }}{% endfor %}{% for x in range(5) if x is odd %}{{ loop.length }}{{ x }}"
        "{% else %}none{% endfor %}{% for x in nothing %}{% else %}none{% endfor %}"
        "{% for x in 'abc' %}{{ x }}{% break %}{% endfor %}"
    )
    parts = template(source).render([])
    assert "".join(part.text for part in parts) == "1/2Falsea1('b', 2)2/2Trueb22123nonea"


@pytest.mark.parametrize("source", ["{% if %}", "{{ raise_exception('no') }}", "{{ '\\ud800' }}", "{{ 1 / 0 }}"])
def test_a_template_that_refuses(source):
    with pytest.raises(TemplateError, match="The chat template"):
        asyncio.run(rendered(source))
    with pytest.raises(TemplateError, match="The chat template"):
        template(source).render(HELLO)


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
def test_memory_of_a_process_is_bounded(name):
    with pytest.raises(TemplateLimitError, match="more memory than a conversation may take"):
        asyncio.run(rendered(MEMORY[name]))


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
def test_time_of_a_process_is_bounded(name):
    with pytest.raises(TemplateLimitError, match=r"longer than 0\.5 s"):
        asyncio.run(rendered(TIME[name], timeout_s=0.5))
    assert processes() == []


def test_a_long_conversation_may_take_memory():
    """Each character of the two may take four bytes, in each of the renderings."""
    text = "🙂" + "語 word <x>" * 400_000
    source = "{{ messages[0].content | replace('<x>', '') }} <|eot_id|>"
    parts, _ = asyncio.run(rendered(source, [{"role": "user", "content": text}], max_chars=10**8))
    assert sum(len(part.text) for part in parts) == len(text.replace("<x>", "")) + 11
    assert parts[-1] == Part("<|eot_id|>", True)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_is_killed_at_work(signal_number):
    async def killed() -> None:
        rendering = asyncio.ensure_future(rendered(ENDLESS))
        (await at_work()).send_signal(signal_number)
        with pytest.raises(TemplateLimitError, match=rf"has ended its process \(-{signal_number.value}\)"):
            await rendering

    asyncio.run(killed())


def test_a_client_that_leaves_ends_the_process():
    async def left() -> None:
        rendering = asyncio.ensure_future(rendered(ENDLESS))
        await at_work()
        rendering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rendering
        assert processes() == []

    asyncio.run(left())


def test_it_has_no_descriptors_and_no_secrets(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    read, write = os.pipe()
    os.set_inheritable(write, True)

    async def look() -> None:
        rendering = asyncio.ensure_future(rendered(ENDLESS))
        process = await at_work()
        assert "API_KEY" not in process.environ() and process.environ()["TZ"] == "Asia/Tokyo"
        targets = [os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert len(targets) == 3 and f"pipe:[{os.fstat(write).st_ino}]" not in targets
        assert process.rlimit(resource.RLIMIT_CORE) == (0, 0)
        assert os.getpgid(process.pid) != os.getpgid(0)
        mapped = {Path(mapping.path).name for mapping in process.memory_maps()}
        assert not any(name.startswith(("jaxlib", "xla", "tokenizers")) for name in mapped)
        rendering.cancel()
        await asyncio.wait([rendering])

    try:
        asyncio.run(look())
    finally:
        os.close(read)
        os.close(write)


def test_where_no_process_can_be_started_it_says_so(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        asyncio.run(rendered(SOURCE))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ChildProcessError, match="exit code 1"):
        asyncio.run(rendered(SOURCE))


def test_waiting_requests_are_counted_and_slow_ones_delay_no_others():
    async def all_at_once() -> None:
        runner = TemplateRunner(timeout_s=60.0)

        def own(source: str):
            return asyncio.ensure_future(runner.render_source(source, TOKENIZER, messages=HELLO))

        waiting = [own(ENDLESS) for _ in range(MAX_WAITING)]
        await at_work()
        with pytest.raises(TooManyTemplatesError):
            await own(SOURCE)
        shown = await asyncio.gather(*(runner.run(template().render, HELLO) for _ in range(200)))
        assert shown == [SHOWN] * 200
        assert len(processes()) <= NUM_PROCESSES
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        assert (await own(SOURCE))[0] == SHOWN

    asyncio.run(all_at_once())
