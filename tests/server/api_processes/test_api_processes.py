"""Two HTTP processes in front of one engine, which serve as one server. Real processes over real sockets."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.server.support.api_processes import http_processes, through_each
from tests.server.support.owners import check_owner
from tests.server.support.requests import CHAT, HELLO, LONG, SLOW, wait_until
from tests.server.support.running import server_of
from tests.server.support.sse_events import parse_events, parse_named_events

KEY = {"Authorization": "Bearer key"}
ADMIN = {"Authorization": "Bearer boss"}
RESPONSES = "/v1/responses"
MOST_PER_KEY = 3


server = server_of(
    SLOW, api_server_count=2, api_keys=("key",), admin_api_keys=("boss",), max_concurrent_per_key=MOST_PER_KEY
)


@pytest.fixture
def both(server) -> Iterator[list[httpx.Client]]:
    """Clients of the first and of the second process, with the ordinary key."""
    with through_each(server, headers=KEY) as clients:
        yield clients


@contextlib.contextmanager
def stream(client: httpx.Client, path: str = CHAT, **fields: object) -> Iterator[Iterator[str]]:
    """A stream that has begun."""
    with client.stream("POST", path, json=LONG | fields if path == CHAT else fields) as answer:
        assert answer.status_code == 200, answer.read()
        pieces = answer.iter_text()
        yield itertools.chain([next(pieces)], pieces)


def figure(client: httpx.Client, name: str) -> float:
    """The sum of a metric's samples whose lines begin with this."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def responses_counted(client: httpx.Client) -> float:
    return figure(client, f'http_requests_total{{handler="{CHAT}",method="POST",status="200"')


def running_in_engine(client: httpx.Client) -> float:
    return figure(client, "pallas_serve:num_requests_running{")


def wait_for_counts(reader: httpx.Client, other: httpx.Client) -> None:
    """Until the one process knows what the other has counted: they tell each other every second."""
    asked = 'http_requests_total{handler="/version"'
    before = figure(reader, asked)
    other.get("/version")
    wait_until(lambda: figure(reader, asked) > before)


def test_both_say_what_one_would(both):
    texts = []
    for client in both:
        answer = client.post(CHAT, json=HELLO | {"max_tokens": 25, "ignore_eos": True}).json()
        texts.append(answer["choices"][0]["message"]["content"])
        events = parse_events(client.post(CHAT, json=LONG | {"max_tokens": 25}).text)
        deltas = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
        texts.append("".join(deltas))
    assert texts == ["abcdefghijabcdefghijabcde"] * 4


def test_streams_run_through_both_at_once_and_the_load_is_that_of_all(both):
    first, second = both
    with stream(first), stream(second), httpx.Client(base_url=first.base_url, headers=KEY) as other:
        wait_until(lambda: running_in_engine(other) == 2)
        assert other.get("/load").json() == {"server_load": 2}
    wait_until(lambda: first.get("/load").json() == {"server_load": 0})
    wait_until(lambda: running_in_engine(second) == 0)  # both have aborted theirs


def test_metrics_of_each_are_the_sums(both):
    names = ("pallas_serve:request_params_n_count", "pallas_serve:request_max_num_generation_tokens_sum")
    wait_for_counts(*both)
    before = responses_counted(both[0]), *(figure(both[0], name) for name in names)
    for client, count in zip(both, (2, 3), strict=True):
        for _ in range(count):
            assert client.post(CHAT, json=HELLO | {"max_tokens": 2, "ignore_eos": True}).status_code == 200
    for client in both:
        wait_until(lambda client=client: responses_counted(client) == before[0] + 5)
        assert [figure(client, name) - old for name, old in zip(names, before[1:], strict=True)] == [5, 10]
    texts = [client.get("/metrics").text for client in both]
    families = [re.findall(r"^# TYPE (\S+)", text, re.MULTILINE) for text in texts]
    assert families[0] == families[1]
    assert len(set(families[0])) == len(families[0])


def test_memory_is_that_of_both_processes(server, both):
    def resident() -> list[int]:
        return [process.memory_info().rss for process in http_processes(server)]

    wait_until(lambda: figure(both[0], "process_resident_memory_bytes") > 1.5 * max(resident()))
    assert figure(both[0], "process_resident_memory_bytes") < 3 * max(resident())


def test_a_conversation_is_found_by_both(both):
    first, second = both
    hello = {"role": "user", "content": "hello"}
    made = first.post("/v1/conversations", json={"items": [hello]}).json()
    path = f"/v1/conversations/{made['id']}"
    assert second.get(path).json() == first.get(path).json() == made
    added = second.post(f"{path}/items", json={"items": [hello]}).json()["data"][0]
    assert second.post(path, json={"metadata": {"a": "b"}}).json()["metadata"] == {"a": "b"}
    body = {"input": "and?", "max_output_tokens": 4, "ignore_eos": True, "conversation": made["id"]}
    response = second.post(RESPONSES, json=body).json()
    assert response["conversation"] == {"id": made["id"]}
    pages = [client.get(f"{path}/items").json() for client in both]
    assert pages[0] == pages[1]
    assert [item["id"] for item in pages[0]["data"]][0::2] == [response["output"][0]["id"], added["id"]]
    assert second.get(f"{path}/items/{added['id']}").json() == added
    named = [{"type": "item_reference", "id": id} for id in (added["id"], response["output"][0]["id"])]
    counted = [client.post(f"{RESPONSES}/input_tokens", json={"input": named}).json() for client in both]
    assert counted[0] == counted[1]
    assert counted[0]["input_tokens"] > 0
    copied = second.post("/v1/conversations", json={"items": named}).json()
    assert len(first.get(f"/v1/conversations/{copied['id']}/items").json()["data"]) == 2
    assert second.delete(f"{path}/items/{added['id']}").status_code == 200
    assert second.delete(path).json()["deleted"] is True
    assert [client.get(path).status_code for client in both] == [404, 404]


def test_a_response_in_the_background_is_found_by_both(both):
    """Each counts for its key."""
    first, second = both
    body = {"input": "hello", "background": True, "stream": True, "max_output_tokens": 4, "ignore_eos": True}
    events = first.post(RESPONSES, json=body).text
    id = parse_named_events(events)[0]["response"]["id"]
    assert [client.get(f"{RESPONSES}/{id}?stream=true").text for client in both] == [events] * 2
    endless = {"input": "more", "background": True, "previous_response_id": id, "ignore_eos": True}
    made = [second.post(RESPONSES, json=endless).json() for _ in range(MOST_PER_KEY)]
    for client in both:
        assert client.post(CHAT, json=HELLO).status_code == 429
        assert client.get("/load").json() == {"server_load": MOST_PER_KEY}
    for response, client in zip(made, itertools.cycle(both), strict=False):
        assert client.post(f"{RESPONSES}/{response['id']}/cancel").json()["status"] == "cancelled"
    wait_until(lambda: first.get("/load").json() == {"server_load": 0})
    assert first.post(CHAT, json=HELLO | {"max_tokens": 1}).status_code == 200


def test_the_events_of_a_running_response_are_read_through_the_other_process(server, both):
    first, second = both
    body = {"input": "hello", "background": True, "stream": True, "ignore_eos": True}
    with stream(first, RESPONSES, **body) as pieces:
        id = re.search(r'"(resp-\w+)"', next(pieces))[1]
    with (
        through_each(server, headers=KEY) as (_, reader),
        reader.stream("GET", f"{RESPONSES}/{id}?stream=true") as answer,
    ):
        pieces, text = answer.iter_text(), ""
        while "output_text.delta" not in text:
            text += next(pieces)
        assert second.post(f"{RESPONSES}/{id}/cancel").json()["status"] == "cancelled"
        events = parse_named_events(text + "".join(pieces))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "cancelled")
    wait_until(lambda: first.get("/load").json() == {"server_load": 0})


def test_a_response_is_found_by_both(both):
    first, second = both
    made = first.post(RESPONSES, json={"input": "hello", "max_output_tokens": 4}).json()
    path = f"{RESPONSES}/{made['id']}"
    assert second.get(path).json() == first.get(path).json() == made
    assert second.get(f"{path}/input_items").json() == first.get(f"{path}/input_items").json()
    next_one = {"input": "and then?", "max_output_tokens": 4, "previous_response_id": made["id"]}
    counted = [client.post(f"{RESPONSES}/input_tokens", json=next_one).json() for client in both]
    assert counted[0] == counted[1]
    answers = [client.post(RESPONSES, json=next_one).json() for client in both]
    assert answers[0]["usage"]["input_tokens"] == answers[1]["usage"]["input_tokens"] == counted[0]["input_tokens"]
    assert answers[1]["usage"]["input_tokens"] > made["usage"]["input_tokens"]
    # The third turn: the second was made through the other process.
    third = first.post(RESPONSES, json=next_one | {"previous_response_id": answers[1]["id"]}).json()
    assert third["usage"]["input_tokens"] > answers[1]["usage"]["input_tokens"]
    assert second.post(f"{path}/cancel").status_code == first.post(f"{path}/cancel").status_code == 400
    assert second.delete(path).json()["deleted"] is True
    for client in both:
        assert client.get(path).status_code == 404
        assert client.post(RESPONSES, json=next_one).status_code == 400


def test_a_response_that_runs_is_cancelled_through_the_other_process(both):
    first, second = both
    with stream(first, RESPONSES, input="hello", stream=True, ignore_eos=True, max_output_tokens=3000) as pieces:
        text = next(pieces)
        while (found := re.search(r'"(resp-\w+)"', text)) is None:
            text += next(pieces)
        id = found[1]
        assert second.get(f"{RESPONSES}/{id}").json()["status"] == "in_progress"
        assert second.post(f"{RESPONSES}/{id}/cancel").json()["status"] == "cancelled"
        assert "cancelled" in "".join(pieces)


def test_a_response_belongs_to_its_key_in_both(server, both):
    first, second = both
    with through_each(server, headers=ADMIN) as others:
        for own, other in ((first, others[1]), (second, others[0]), (first, others[0])):
            check_owner(own, other)


def test_a_key_has_its_share_of_all_processes(both):
    first, second = both
    wait_until(lambda: first.get("/load").json() == {"server_load": 0})
    with contextlib.ExitStack() as stack:
        for client in (first, second, first):
            own = stack.enter_context(httpx.Client(base_url=client.base_url, headers=KEY, timeout=30))
            stack.enter_context(stream(own))
        for client in both:
            assert client.post(CHAT, json=HELLO).status_code == 429
    wait_until(lambda: first.get("/load").json() == {"server_load": 0})
    assert all(client.post(CHAT, json=HELLO | {"max_tokens": 1}).status_code == 200 for client in both)


def test_an_administrator_aborts_the_requests_of_both(both):
    texts: list[str] = []

    def read(client: httpx.Client, begun: threading.Event) -> None:
        with stream(client) as pieces:
            begun.set()
            texts.append("".join(pieces))

    begun = [threading.Event(), threading.Event()]
    readers = [threading.Thread(target=read, args=pair) for pair in zip(both, begun, strict=True)]
    for reader, event in zip(readers, begun, strict=True):
        reader.start()
        assert event.wait(30)
    with httpx.Client(base_url=both[0].base_url, headers=ADMIN, timeout=30) as admin:
        assert len(admin.post("/abort_requests", json={}).json()["aborted"]) == 2
    for reader in readers:
        reader.join(30)
    assert len(texts) == 2
    assert all("aborted by the server's administrator" in text for text in texts)


def test_the_log_level_is_that_of_all(server):
    with through_each(server, headers=ADMIN) as (first, second):
        assert first.post("/log_level", json={"level": "debug"}).json() == {"level": "debug"}
        assert second.get("/log_level").json() == {"level": "debug"}
        assert second.post("/log_level", json={"level": "warning"}).json() == {"level": "warning"}
        assert first.get("/log_level").json() == {"level": "warning"}


def test_changes_of_weights_are_the_engines_affair(server):
    with through_each(server, headers=ADMIN) as clients:
        for client in clients:
            assert client.get("/is_sleeping").json() == {"is_sleeping": False}
            refused = client.post("/sleep")
            assert refused.status_code == 400
            assert "cannot pause or change its weights while it serves" in refused.json()["error"]["message"]
            assert client.post("/reset_prefix_cache").status_code == 200


def test_a_process_that_is_killed_loses_its_requests_only_and_is_started_again(server):
    """The last test of the module's server: the processes are others after it."""
    before = http_processes(server)
    with through_each(server, headers=KEY) as (first, second):
        assert second.post(CHAT, json=HELLO | {"max_tokens": 1}).status_code == 200
        made = second.post(RESPONSES, json={"input": "hello", "max_output_tokens": 4}).json()
        wait_for_counts(first, second)
        counted = responses_counted(first)
        with contextlib.ExitStack() as stack:
            other = stack.enter_context(httpx.Client(base_url=first.base_url, headers=KEY))
            kept = stack.enter_context(stream(first))
            lost = stack.enter_context(stream(second))
            wait_until(lambda: running_in_engine(other) == 2)
            before[1].kill()
            with pytest.raises(httpx.RemoteProtocolError):
                "".join(lost)
            next(kept)
            wait_until(lambda: len(http_processes(server)) == 2 and before[1] not in http_processes(server))
            next(kept)
    with through_each(server, headers=KEY) as clients:
        for client in clients:
            wait_until(lambda client=client: running_in_engine(client) == 0)
            # What the killed process had counted a second before is not lost.
            assert responses_counted(client) >= counted
            assert client.get("/load").json() == {"server_load": 0}
            assert client.post(CHAT, json=HELLO | {"max_tokens": 1}).status_code == 200
            assert client.get(f"{RESPONSES}/{made['id']}").json() == made
    assert "HTTP process 1 has ended (exit code -9): its requests are aborted, and it is started again" in server.log


@pytest.mark.parametrize("again", [False, True])
def test_what_a_test_leaves_running_ends_with_it(both, again):
    """Each of the two finds a server without requests, and leaves as many as the key may have."""
    assert both[0].get("/load").json() == {"server_load": 0}
    endless = {"input": "hello", "background": True, "ignore_eos": True}
    for client, _ in zip(itertools.cycle(both), range(MOST_PER_KEY), strict=False):
        assert client.post(RESPONSES, json=endless).status_code == 200
