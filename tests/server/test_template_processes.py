"""Servers whose templates cost much, in real processes: others do not wait, and a process that dies is replaced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.server.support.canary import canary
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import wait_until
from tests.server.support.running import ECHO, RunningServer, running_server, server_of
from tests.server.text.test_template_runner import runs_templates

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
CONFIG = EchoConfig(reply=tuple(b"a"))
SETTINGS = {"trust_request_chat_template": True, "template_timeout_s": 2.0}
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
COSTLY = {
    "{{ 'a' | center(3000000000) }}": "more memory",
    "{{ 'a' | center(30000000) }}{{ messages[0].content }}": "maximum context length",
    "{{ '%3000000000d' % 1 }}": "more memory",
    "{{ [[1]] | tojson(indent=3000000000) }}": "more memory",
    "{% set ns = namespace(a='a') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}": "more memory",
    "{{ (messages | length + 9) ** (10 ** 10) }}": "longer than 2 s",
    LOOPS: "longer than 2 s",
}


server = server_of(CONFIG, **SETTINGS)


def template_processes(server: RunningServer) -> list[psutil.Process]:
    family = psutil.Process(server.process.pid).children(recursive=True)
    return list(filter(runs_templates, family))


@pytest.mark.parametrize("template", COSTLY)
def test_a_template_of_a_request_is_stopped_and_nobody_waits(server, template):
    with server.http() as http, canary(server):
        response = http.post(CHAT, json=HELLO | {"chat_template": template})
        assert response.status_code == 400
        assert COSTLY[template] in response.json()["error"]["message"]
        assert http.post(CHAT, json=HELLO).status_code == 200
    assert psutil.Process(server.process.pid).memory_info().rss < 400 << 20


def test_many_costly_templates_at_once_delay_no_ordinary_conversation(server):
    with server.http() as http, ThreadPoolExecutor(80) as threads, canary(server):
        own = [threads.submit(http.post, CHAT, json=HELLO | {"chat_template": LOOPS}, timeout=5) for _ in range(80)]
        assert all(http.post(CHAT, json=HELLO).status_code == 200 for _ in range(20))
        assert len(template_processes(server)) <= 3
        refused = [one.result() for one in own if one.exception() is None]
    assert {429} <= {response.status_code for response in refused} <= {400, 429}
    assert all("wait to be rendered" in one.json()["error"]["message"] for one in refused if one.status_code == 429)


def test_killed_processes_are_replaced_and_none_is_left(server):
    own = psutil.Process(server.process.pid)
    with server.http() as http:
        assert http.post(CHAT, json=HELLO).status_code == 200
        num_fds = own.num_fds()
        for _ in range(5):
            for process in template_processes(server):
                process.kill()
            assert http.post(CHAT, json=HELLO).status_code == 200
        assert own.num_fds() <= num_fds
    zombies = [child for child in own.children() if child.status() == psutil.STATUS_ZOMBIE]
    assert len(zombies) <= 2  # idle ones, until the next conversation


def test_a_process_at_work_outlives_a_killed_server_by_seconds_only(tmp_path):
    settings = SETTINGS | {"template_timeout_s": 6.0}
    with running_server(tmp_path, ECHO, CONFIG, **settings) as server, ThreadPoolExecutor(1) as thread:
        with server.http() as http:
            (process,) = template_processes(server)
            idle = process.cpu_times().user
            asked = thread.submit(http.post, CHAT, json=HELLO | {"chat_template": LOOPS})
            wait_until(lambda: process.cpu_times().user > idle + 0.1)
            server.process.kill()
            server.process.wait()
            assert asked.exception(30) is not None
        wait_until(lambda: not process.is_running())


def test_each_http_process_has_its_own(tmp_path):
    with running_server(tmp_path, ECHO, CONFIG, api_server_count=2, **SETTINGS) as server:
        processes = template_processes(server)
        parents = {process.ppid() for process in processes}
        assert len(processes) == len(parents) == 2
        assert server.process.pid not in parents
    assert not any(process.is_running() for process in processes)
