"""/v1/files and /v1/batches by OpenAI's client: real processes, real sockets, a real folder."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from server.api.routes.batches.work import PRIORITY
from server.batches.store import BatchStore
from server.database import NAME, Database, FullError
from tests.server.support.api_processes import http_processes, through_each
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT, wait_until
from tests.server.support.running import ECHO, RunningServer, running_server
from tests.server.support.stub_app import DONE, StubClient, call, client_of, state_of

COMPLETIONS, RESPONSES, EMBEDDINGS = "/v1/completions", "/v1/responses", "/v1/embeddings"
FIELDS = {COMPLETIONS: "prompt", RESPONSES: "input"}
AS_ONE = {"Authorization": "Bearer one"}
OVER = ("completed", "failed", "cancelled", "expired")
FAST = EchoConfig(reply=tuple(b"hello"))
SLOW = EchoConfig(reply=tuple(b"abcdefghij"), step_s=0.02)
DAY_S = 24 * 3600


def line(custom_id: str, url: str = COMPLETIONS, **body: object) -> str:
    body = ({"messages": [{"role": "user", "content": "a"}]} if url == CHAT else {FIELDS[url]: "a"}) | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def upload(client: openai.OpenAI, lines: Sequence[str]) -> str:
    content = "".join(text + "\n" for text in lines).encode()
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def begin(client: openai.OpenAI, lines: Sequence[str], endpoint: str = COMPLETIONS, **fields: object) -> str:
    file = upload(client, lines)
    return client.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h", **fields).id


def wait(client: openai.OpenAI, id: str, *statuses: str) -> openai.types.Batch:
    wait_until(lambda: client.batches.retrieve(id).status in (statuses or OVER))
    return client.batches.retrieve(id)


def records(client: openai.OpenAI, file: str | None) -> list[dict]:
    return [] if file is None else [json.loads(text) for text in client.files.content(file).text.splitlines()]


def ids(found: list[dict]) -> list[str]:
    return [record["custom_id"] for record in found]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("batches")
    with running_server(folder, ECHO, FAST, batch_folder=folder / "kept", api_keys=("one", "two")) as running:
        yield running


@pytest.fixture
def client(server) -> openai.OpenAI:
    return server.client(api_key="one")


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT, RESPONSES])
def test_a_batch_from_its_file_to_its_answers(client, url):
    metadata = {"night": "7"}
    id = begin(client, [line(f"q{i}", url) for i in range(20)], url, metadata=metadata)
    batch = wait(client, id)
    assert (batch.status, batch.errors, batch.error_file_id, batch.metadata) == ("completed", None, None, metadata)
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert list(times) == sorted(times)
    assert batch.expires_at == batch.created_at + DAY_S
    found = records(client, batch.output_file_id)
    assert ids(found) == [f"q{i}" for i in range(20)]  # in the order of the input
    assert {record["response"]["status_code"] for record in found} == {200}
    assert {record["response"]["request_id"] for record in found} == {
        record["response"]["body"]["id"] for record in found
    }
    body = found[0]["response"]["body"]
    texts = {
        COMPLETIONS: lambda: body["choices"][0]["text"],
        CHAT: lambda: body["choices"][0]["message"]["content"],
        RESPONSES: lambda: body["output"][0]["content"][0]["text"],
    }
    assert texts[url]() == "hello"
    if url == RESPONSES:
        with pytest.raises(openai.NotFoundError):  # it does not displace those of conversations
            client.responses.retrieve(body["id"])


def test_refused_requests_are_in_the_error_file(client):
    lines = [line("a"), line("hot", temperature=-9), line("b"), line("none", model="another")]
    batch = wait(client, begin(client, lines))
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
    assert ids(records(client, batch.output_file_id)) == ["a", "b"]
    hot, none = records(client, batch.error_file_id)
    assert (hot["custom_id"], hot["response"]["status_code"]) == ("hot", 400)
    assert hot["response"]["body"]["error"]["param"] == "temperature"
    assert (none["custom_id"], none["response"]["status_code"]) == ("none", 404)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ('{"method": "POST", "url": "/v1/completions", "body": {}}', "custom_id"),
        (json.dumps({"custom_id": "x", "method": "GET", "url": COMPLETIONS, "body": {}}), "must be POST"),
        (line("x", CHAT), f"the batch is for {COMPLETIONS}"),
        (json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/models", "body": {}}), "url must be"),
        (line("first"), "is taken by a line before"),
        (line("x", stream=True), "stream"),
        (line("x", prompt=[[1]] * 70_000), "brackets and colons"),
    ],
)
def test_a_bad_line_fails_the_batch_before_any_is_asked(client, text, said):
    batch = wait(client, begin(client, [line("first"), "", text, line("last")]))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    (error,) = batch.errors.data
    assert error.line == 3
    assert said in error.message
    assert batch.output_file_id is None
    assert batch.request_counts.completed == 0


def test_a_file_without_lines_and_one_with_too_many(client):
    batch = wait(client, begin(client, [""]))
    assert (batch.status, batch.errors.data[0].code) == ("failed", "empty_file")
    batch = wait(client, begin(client, [line(str(i)) for i in range(50_001)]))
    assert (batch.status, batch.errors.data[0].code) == ("failed", "too_many_requests")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": EMBEDDINGS}, "endpoint"),  # this engine makes none
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": f"file-{'0' * 32}"}, "input_file_id"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ],
)
def test_what_a_batch_cannot_be(client, fields, param):
    given = {"input_file_id": upload(client, [line("a")]), "endpoint": COMPLETIONS, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**given | fields)
    assert refused.value.param == param


def test_a_file_from_its_upload_to_its_end(client):
    content = "ünïcode\n".encode() * 100_000
    file = client.files.create(file=("名 前.jsonl", content), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(content), "名 前.jsonl", "batch")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    assert client.files.delete(file.id).model_dump() == {"id": file.id, "object": "file", "deleted": True}
    for forgotten in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            forgotten(file.id)


def test_pages(server):
    client = server.client(api_key="two")
    files = [upload(client, [line(str(i))]) for i in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == files[::-1]  # the client asks for the next page
    assert [file.id for file in client.files.list(limit=2, order="asc", after=files[1])] == files[2:]
    page = client.files.list(limit=3)
    assert (page.has_more, len(page.data)) == (True, 3)
    made = [
        client.batches.create(input_file_id=file, endpoint=COMPLETIONS, completion_window="24h").id for file in files
    ]
    for id in made:
        wait(client, id)
    assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
    assert [file.id for file in client.files.list(purpose="batch")] == files[::-1]
    outputs = {client.batches.retrieve(id).output_file_id for id in made}
    assert {file.id for file in client.files.list(purpose="batch_output")} == outputs
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"purpose": "vision"}):
        with pytest.raises(openai.BadRequestError):
            client.files.list(**wrong)


def test_files_and_batches_are_hidden_from_other_keys(server, client):
    other = server.client(api_key="two")
    id = begin(client, [line("a")])
    batch = wait(client, id)
    for read in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            read(id)
    for file in (batch.input_file_id, batch.output_file_id):
        for read in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                read(file)
    with pytest.raises(openai.BadRequestError):
        other.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
    assert not {file.id for file in other.files.list()} & {batch.input_file_id, batch.output_file_id}
    assert id not in {batch.id for batch in other.batches.list()}
    assert client.files.retrieve(batch.input_file_id).id == batch.input_file_id


PATHS = ("..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "file-../../x", f"file-{'0' * 32}.json", "file-%00", "lock")


@pytest.mark.parametrize("id", PATHS)
def test_an_id_is_no_path(server, id):
    with server.http(headers=AS_ONE) as http:
        for target in (f"/v1/files/{id}", f"/v1/files/{id}/content", f"/v1/batches/{id}"):
            request = http.build_request("GET", server.url)
            request.url = request.url.copy_with(raw_path=target.encode())
            assert http.send(request).status_code == 404
            assert http.delete(f"/v1/files/{id}").status_code == 404


def form(*parts: tuple[str, str, bytes], end: bytes = b"--XX--\r\n") -> dict:
    heads = [f'--XX\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() for name, more, _ in parts]
    body = b"".join(head + content + b"\r\n" for head, (*_, content) in zip(heads, parts, strict=True)) + end
    return {
        "content": body,
        "headers": {"Content-Type": "multipart/form-data; boundary=XX", "Authorization": "Bearer one"},
    }


FILE, PURPOSE = ("file", '; filename="a"', b"x\n"), ("purpose", "", b"batch")


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        (form(FILE, PURPOSE), 200, '"bytes":2'),
        (form(PURPOSE, FILE, ("other", "", b"1")), 200, '"bytes":2'),
        (form(PURPOSE), 400, "file: is missing"),
        (form(FILE), 400, "purpose"),
        (form(FILE, ("purpose", "", b"fine-tune")), 400, "fine-tune"),
        (form(("file", "", b"x\n"), PURPOSE), 400, "file: must have a filename"),
        (form(FILE, FILE, PURPOSE), 400, "Too many files. Maximum number of files is 1."),
        (form(FILE, PURPOSE, *[("other", "", b"1")] * 3), 400, "Too many fields. Maximum number of fields is 3."),
        (form(FILE, PURPOSE, ("expires_after[seconds]", "", b"3600")), 400, "expires_after"),
        (form(PURPOSE, FILE, end=b""), 400, "file: is missing"),
        (form(FILE, ("purpose", "", b"batch" * 1000)), 400, "Part exceeded maximum size of 1KB."),
        (form(("file", "\r\nX: " + "y" * 40_000, b"")), 400, "The form cannot be read: Invalid multipart data."),
        (form(("file", "\r\nX: y" * 40_000, b"")), 400, "The form cannot be read: Invalid multipart data."),
        ({"content": b"{}", "headers": AS_ONE | {"Content-Type": "application/json"}}, 415, "multipart"),
        ({"content": b"", "headers": AS_ONE | {"Content-Type": "multipart/form-data"}}, 400, "boundary"),
    ],
)  # fmt: skip
def test_forms(server, asked, status, said):
    with server.http() as http:
        answer = http.post("/v1/files", **asked)
    assert answer.status_code == status, answer.text
    assert said in answer.text


def test_without_the_flag_the_routes_name_it(tmp_path):
    with running_server(tmp_path, ECHO, FAST) as server, server.http() as http:
        for path in ("/v1/files", "/v1/batches", f"/v1/files/file-{'0' * 32}"):
            answer = http.get(path)
            assert answer.status_code == 404
            assert "--batch-folder" in answer.json()["error"]["message"]


def test_the_folder_is_private_and_one_that_others_may_enter_is_refused(server, tmp_path):
    kept = server.log_file.parent / "kept"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with (
        pytest.raises(RuntimeError, match="ended before it was ready"),
        running_server(tmp_path, ECHO, FAST, batch_folder=tmp_path / "open"),
    ):
        pass
    assert "chmod 700" in (tmp_path / "stderr").read_text()


def test_a_batch_is_cancelled_in_the_middle(tmp_path):
    with running_server(tmp_path, ECHO, SLOW, batch_folder=tmp_path / "kept", batch_concurrency=4) as server:
        client = server.client()
        asked = [line(f"q{i}", max_tokens=8) for i in range(2_000)]
        id = begin(client, asked)
        wait_until(lambda: client.batches.retrieve(id).request_counts.completed)
        assert client.batches.cancel(id).status == "cancelling"
        batch = wait(client, id)
        assert batch.status == "cancelled"
        assert batch.cancelling_at <= batch.cancelled_at
        answered, left = records(client, batch.output_file_id), records(client, batch.error_file_id)
        assert answered
        assert left
        assert sorted(ids(answered) + ids(left)) == sorted(f"q{i}" for i in range(2_000))
        assert {record["error"]["code"] for record in left} == {"batch_cancelled"}
        assert batch.request_counts.model_dump() == {"total": 2_000, "completed": len(answered), "failed": len(left)}
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(id)
        with server.http() as http:
            wait_until(lambda: http.get("/load").json() == {"server_load": 0})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_batch_goes_on_where_the_server_has_ended(tmp_path, number):
    kept = tmp_path / "kept"
    with running_server(tmp_path / "first", ECHO, SLOW, batch_folder=kept, batch_concurrency=4) as server:
        client = server.client()
        id = begin(client, [line(f"q{i}", max_tokens=8) for i in range(100)])
        wait_until(lambda: client.batches.retrieve(id).request_counts.completed)
        server.process.send_signal(number)
        server.process.wait(30)
    before = {json.loads(record)["id"] for (record,) in rows(kept, "SELECT record FROM records")}
    assert 0 < len(before) < 100
    with running_server(tmp_path / "second", ECHO, SLOW, batch_folder=kept) as server:
        client = server.client()
        batch = wait(client, id)
        assert batch.status == "completed"
        found = records(client, batch.output_file_id)
        assert ids(found) == [f"q{i}" for i in range(100)]
        assert before <= {record["id"] for record in found}  # they were not asked again
        assert rows(kept, "SELECT count(*) FROM records") == [(0,)]


def rows(folder: Path, statement: str) -> list[tuple]:
    """Executes a statement in the database of a folder."""
    with contextlib.closing(sqlite3.connect(folder / NAME)) as database, database:
        return database.execute(statement).fetchall()


@pytest.mark.slow
def test_two_processes_run_a_batch_once_and_one_takes_it_up_from_the_other(tmp_path):
    kept = tmp_path / "kept"
    with (
        running_server(tmp_path, ECHO, SLOW, batch_folder=kept, api_server_count=2, batch_concurrency=4) as server,
        through_each(server) as both,
    ):
        client = server.client(max_retries=3)
        id = begin(client, [line(f"q{i}", max_tokens=8) for i in range(100)])
        wait_until(lambda: client.batches.retrieve(id).request_counts.completed)
        for http in both:  # any process tells how far it is
            assert http.get(f"/v1/batches/{id}").json()["status"] == "in_progress"
        holders = [process for process in http_processes(server) if holds(process, kept)]
        assert len(holders) == 1
        holders[0].kill()
        batch = wait(client, id)
        found = records(client, batch.output_file_id)
        assert ids(found) == [f"q{i}" for i in range(100)]
        assert len({record["id"] for record in found}) == 100


def holds(process: psutil.Process, folder: Path) -> bool:
    return any(file.path == str(folder / "lock") for file in process.open_files())


def test_a_batch_waits_while_the_engine_has_no_room(tmp_path):
    config = EchoConfig(reply=tuple(b"ab"), step_s=0.01, max_live=2)
    with running_server(tmp_path, ECHO, config, batch_folder=tmp_path / "kept", batch_concurrency=8) as server:
        client = server.client()
        batch = wait(client, begin(client, [line(f"q{i}") for i in range(30)]))
        assert batch.request_counts.model_dump() == {"total": 30, "completed": 30, "failed": 0}


def test_a_full_folder(tmp_path):
    with running_server(tmp_path, ECHO, FAST, batch_folder=tmp_path / "kept", batch_folder_gib=1 / 1024) as server:
        client = server.client()
        with pytest.raises(openai.InternalServerError) as full:
            upload(client, ["x" * 2**20])
        assert full.value.status_code == 507
        assert "--batch-folder-size" in full.value.message
        assert not list(client.files.list())
        id = begin(client, [line(f"q{i}", max_tokens=5, ignore_eos=True) for i in range(3000)])
        batch = wait(client, id)
        assert batch.status == "failed"
        assert batch.errors.data[0].code == "storage_full"
        answered = records(client, batch.output_file_id)
        assert 0 < len(answered) < 3000
        assert sum(file.stat().st_size for file in (tmp_path / "kept/files").iterdir()) <= 2**20
        for file in (batch.output_file_id, batch.input_file_id):
            client.files.delete(file)
        assert wait(client, begin(client, [line("a")])).status == "completed"


def test_room_is_kept_for_what_is_received(tmp_path):
    """Whoever receives a file has its room until the file is kept or given up."""
    first, second = (BatchStore(Database(tmp_path), tmp_path, 1000) for _ in range(2))  # of two processes
    given_up = first.reserve(b"", 600)
    with pytest.raises(FullError):
        second.reserve(b"", 600)
    first.release(given_up)
    id = second.reserve(b"", 600)
    second.keep(id, io.BytesIO(b"x" * 100), "a")
    second.release(id)
    assert first.find(b"", "file", id)["bytes"] == 100
    with pytest.raises(FullError):
        first.reserve(b"", 901)
    first.reserve(b"", 600)


def test_uploads_of_processes_that_were_killed_are_removed(tmp_path, monkeypatch):
    store = BatchStore(Database(tmp_path), tmp_path, 1000)
    abandoned = store.reserve(b"", 600)
    store.content(abandoned).write_bytes(b"x")
    monkeypatch.setattr("server.batches.store.time.time", lambda: time.monotonic() + 2 * time.time_ns() / 1e9)
    fresh = store.reserve(b"", 300)
    store.content(fresh).write_bytes(b"x")
    store.sweep()
    assert [path.name for path in (tmp_path / "files").iterdir()] == [fresh]
    store.reserve(b"", 700)


def test_an_upload_takes_no_memory_and_one_that_is_too_long_is_refused(tmp_path):
    kept = tmp_path / "kept"
    with (
        running_server(tmp_path, ECHO, FAST, batch_folder=kept, max_body_memory_mib=16) as server,
        server.http() as http,
    ):
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        asked = form(PURPOSE, ("file", '; filename="a"', b"x" * (100 * 10**6)))
        answer = http.post("/v1/files", **asked)
        assert answer.json()["bytes"] == 100 * 10**6
        assert process.memory_info().rss < before + 30 * 2**20

        def endless() -> Iterator[bytes]:
            yield b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            while True:
                yield b"y" * 2**20

        headers = asked["headers"]
        with contextlib.suppress(httpx.WriteError):  # the server has answered and closed before all was sent
            assert http.post("/v1/files", content=endless(), headers=headers).status_code == 413
        wait_until(lambda: len(list(kept.glob("files/*"))) == 1)  # the file that was kept


def test_a_batch_expires_and_one_whose_input_is_gone_fails(tmp_path):
    kept = tmp_path / "kept"
    with running_server(tmp_path / "first", ECHO, SLOW, batch_folder=kept, batch_concurrency=1) as server:
        client = server.client()
        late, orphan = (begin(client, [line(f"q{i}", max_tokens=8) for i in range(500)]) for _ in range(2))
        for id in (late, orphan):
            wait_until(lambda id=id: client.batches.retrieve(id).request_counts.completed)
        client.files.delete(client.batches.retrieve(orphan).input_file_id)
    expire = "json_set(CAST(fields AS TEXT), '$.expires_at', unixepoch() - 1)"
    rows(kept, f"UPDATE objects SET fields = CAST({expire} AS BLOB) WHERE id = '{late}'")
    with running_server(tmp_path / "second", ECHO, SLOW, batch_folder=kept) as server:
        client = server.client()
        batch = wait(client, late)
        assert (batch.status, batch.expired_at is not None) == ("expired", True)
        assert {record["error"]["code"] for record in records(client, batch.error_file_id)} == {"batch_expired"}
        assert records(client, batch.output_file_id)
        batch = wait(client, orphan)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "input_file_not_found")
        assert records(client, batch.output_file_id)


def test_a_damaged_database_is_named_at_the_start(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o700)
    (kept / NAME).write_bytes(b"no database\n" * 100)
    with (
        pytest.raises(RuntimeError, match="ended before it was ready"),
        running_server(tmp_path, ECHO, FAST, batch_folder=kept),
    ):
        pass
    said = (tmp_path / "stderr").read_text()
    assert f"{kept / NAME} cannot be used: file is not a database. Move it away" in said


def test_responses_and_conversations_outlive_the_server(tmp_path):
    kept = tmp_path / "kept"
    with running_server(tmp_path / "first", ECHO, SLOW, batch_folder=kept) as server:
        client = server.client()
        done = client.responses.create(model="test-model", input="hello")
        conversation = client.conversations.create(items=[{"role": "user", "content": "hi"}])
        endless = client.responses.create(
            model="test-model", input="hello", background=True, extra_body={"ignore_eos": True}
        )
        wait_until(lambda: client.responses.retrieve(endless.id).status == "in_progress")
        server.process.kill()
        server.process.wait(30)
    rows(kept, "UPDATE kept SET seen = seen - 60")  # the time after which it counts as failed
    with running_server(tmp_path / "second", ECHO, SLOW, batch_folder=kept) as server:
        client = server.client()
        assert client.responses.retrieve(done.id) == done
        assert client.responses.retrieve(endless.id).status == "failed"
        for continued in ({"previous_response_id": done.id}, {"conversation": conversation.id}):
            response = client.responses.create(model="test-model", input="more", **continued)
            assert response.output_text == "abcdefghij"
            assert response.usage.input_tokens > done.usage.input_tokens
        assert len(client.conversations.items.list(conversation.id).data) == 3


def test_batches_of_a_key_that_is_no_more_accepted_wait(tmp_path):
    kept = tmp_path / "kept"
    with running_server(tmp_path / "first", ECHO, SLOW, batch_folder=kept, api_keys=("old",)) as server:
        id = begin(server.client(api_key="old"), [line(f"q{i}", max_tokens=8) for i in range(2000)])
    with running_server(tmp_path / "second", ECHO, FAST, batch_folder=kept, api_keys=("new",)) as server:
        client = server.client(api_key="new")
        before = rows(kept, f"SELECT fields FROM objects WHERE id = '{id}'")
        assert wait(client, begin(client, [line("a")])).status == "completed"
        assert rows(kept, f"SELECT fields FROM objects WHERE id = '{id}'") == before


def test_requests_of_batches_come_last_and_as_those_of_their_key(tmp_path):
    """What the engine gets."""
    keys = ("one", "two")

    async def run() -> StubClient:
        stub = StubClient(DONE)
        state = state_of(stub, api_keys=keys, prefix_caching_per_key=True, batch_folder=tmp_path / "kept")
        async with client_of(state) as http:
            for key in keys:
                own = {"Authorization": f"Bearer {key}"}
                await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "priority": 5}, headers=own)
                asked = form(PURPOSE, ("file", '; filename="a"', line("a", max_tokens=1, priority=-3).encode()))
                file = (await http.post("/v1/files", content=asked["content"], headers=asked["headers"] | own)).json()
                body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
                assert (await http.post("/v1/batches", json=body, headers=own)).status_code == 200
            running = asyncio.create_task(state.run_batches())
            while len(stub.submitted) < 2 * len(keys):
                await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait([running])
        return stub

    stub = asyncio.run(run())
    interactive = [request for request in stub.submitted if request.priority == 5]
    batched = [request for request in stub.submitted if request.priority != 5]
    assert {request.priority for request in batched} == {PRIORITY}
    identity = attrgetter("client", "cache_salt")
    assert len({*map(identity, batched)}) == 2
    assert {*map(identity, batched)} == {*map(identity, interactive)}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("num_bytes", [10, 3 * 2**20])  # found when the file is closed, and before
def test_an_upload_to_a_full_disk(tmp_path, monkeypatch, num_bytes):
    state = state_of(StubClient(), batch_folder=tmp_path / "kept")
    files = tmp_path / "kept/files"
    monkeypatch.setattr("server.batches.store.new_id", lambda kind: "file-here")
    (files / "file-here").symlink_to("/dev/full")
    answer = call(state, "POST", "/v1/files", **form(PURPOSE, ("file", '; filename="a"', b"x" * num_bytes)))
    assert answer.status_code == 507, answer.text
    assert answer.json()["error"]["code"] == "storage_full"
    assert "disk" in answer.json()["error"]["message"]
    assert [*files.iterdir()] == []


def test_the_oldest_batch_that_is_over_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr("server.batches.store.MAX_BATCHES", 2)
    state = state_of(StubClient(), batch_folder=tmp_path / "kept")
    file = call(state, "POST", "/v1/files", **form(PURPOSE, FILE)).json()["id"]
    asked = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
    first, second = (call(state, "POST", "/v1/batches", json=asked).json() for _ in range(2))
    full = call(state, "POST", "/v1/batches", json=asked)
    assert (full.status_code, full.json()["error"]["code"]) == (507, "storage_full")
    assert state.batches is not None
    state.batches.end(b"", second | {"status": "failed"})
    third = call(state, "POST", "/v1/batches", json=asked).json()
    assert [entry["id"] for entry in call(state, "GET", "/v1/batches").json()["data"]] == [third["id"], first["id"]]


def test_a_full_disk_is_507_where_the_database_has_no_room(tmp_path):
    state = state_of(StubClient(DONE), batch_folder=tmp_path / "kept")
    assert call(state, "GET", f"{RESPONSES}/resp-none").status_code == 404  # the tables are there
    ((pages,),) = state.database.execute("PRAGMA page_count")
    state.database.execute(f"PRAGMA max_page_count = {pages}")
    metadata = {str(number): "x" * 500 for number in range(16)}
    answer = call(state, "POST", RESPONSES, json={"input": "x", "metadata": metadata})
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
    assert call(state, "POST", RESPONSES, json={"input": "x", "store": False}).status_code == 200


def test_a_form_that_cannot_be_read_is_no_line_in_the_log(tmp_path, caplog):
    state = state_of(StubClient(), batch_folder=tmp_path / "kept")
    assert call(state, "POST", "/v1/files", **form(PURPOSE) | {"content": b"--XXx\r\n"}).status_code == 400
    assert [record.message for record in caplog.records if record.name != "httpx"] == []
