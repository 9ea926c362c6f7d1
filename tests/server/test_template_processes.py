"""Servers whose templates cost much, in real processes: others do not wait, and nothing is left."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from server.text.template_runner import NUM_PROCESSES
from tests.server.support.canary import canary
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import wait_until
from tests.server.support.running import ECHO, RunningServer, running_server, server_of
from tests.server.support.tokenizers import LLAMA3_TEMPLATE
from tests.server.text.test_template_runner import runs_templates

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
CONFIG = EchoConfig(reply=tuple(b"a"))
SETTINGS = {"trust_request_chat_template": True, "template_timeout_s": 1.0}
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
COSTLY = {
    "{{ 'a' | center(3000000000) }}": "more memory",
    "{{ 'a' | center(30000000) }}{{ messages[0].content }}": "maximum context length",
    "{{ '%3000000000d' % 1 }}": "more memory",
    "{{ [[1]] | tojson(indent=3000000000) }}": "more memory",
    "{% set ns = namespace(a='a') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}": "more memory",
    "{{ (messages | length + 9) ** (10 ** 10) }}": "longer than 1 s",
    LOOPS: "longer than 1 s",
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
        assert len(template_processes(server)) <= NUM_PROCESSES
        refused = [one.result() for one in own if one.exception() is None]
    assert {429} <= {response.status_code for response in refused} <= {400, 429}
    assert all("wait to be rendered" in one.json()["error"]["message"] for one in refused if one.status_code == 429)


def test_a_process_at_work_outlives_a_killed_server_by_seconds_only(tmp_path):
    settings = SETTINGS | {"template_timeout_s": 6.0}
    with running_server(tmp_path, ECHO, CONFIG, **settings) as server, ThreadPoolExecutor(1) as thread:
        with server.http() as http:
            asked = thread.submit(http.post, CHAT, json=HELLO | {"chat_template": LOOPS})
            wait_until(lambda: template_processes(server))
            (process,) = template_processes(server)
            wait_until(lambda: process.cpu_times().user > 0.5)
            server.process.kill()
            server.process.wait()
            assert asked.exception(30) is not None
        wait_until(lambda: not process.is_running())


def test_a_template_that_still_runs_does_not_keep_the_server(tmp_path):
    """At its deadline the thread ends, and with it the server, though it was asked to end at once."""
    source = LLAMA3_TEMPLATE + "{% if count %}" + LOOPS + "{% endif %}"
    with (
        running_server(tmp_path, ECHO, CONFIG, template=source, template_timeout_s=6.0) as server,
        server.http() as http,
        ThreadPoolExecutor(1) as thread,
    ):
        own = psutil.Process(server.process.pid)
        idle = own.cpu_times().user
        asked = thread.submit(http.post, CHAT, json=HELLO | {"chat_template_kwargs": {"count": 1}}, timeout=60)
        wait_until(lambda: own.cpu_times().user > idle + 0.5)
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        asked.exception(60)
