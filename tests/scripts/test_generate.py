"""Batch files from end to end over the fake runner: formats, order, bad lines, interruption and resumption."""

import _thread
import json
import os
import signal
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from batcher.request import Pooling
from scripts import generate as command
from server.batches.batch_file import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES
from tests.scripts.generating import foretold


def batch_line(custom_id: str, url: str = COMPLETIONS, **body: object) -> str:
    fields = {"model": "m", "max_tokens": 5, "temperature": 0} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields})


def read_records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run(make_llm, model_folder, monkeypatch, tmp_path):
    """Runs the command on the given lines, in a folder of its own; `run.asked` counts the requests that were sent."""

    def go(
        lines: list[str | bytes] | Path, *flags: str, interrupt_after: int | None = None, **runner_options: object
    ) -> int:
        """`lines` are written to a file first, or are the input's path."""
        source = tmp_path / "in.jsonl" if isinstance(lines, list) else lines
        if isinstance(lines, list):
            source.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))

        def make(**keywords: object) -> object:
            llm = make_llm(**runner_options)
            post_all = llm.post_all

            def counted(requests, on_answer):
                def answered(*answer):
                    if interrupt_after is None or go.asked < interrupt_after:
                        go.asked += 1
                        on_answer(*answer)
                        if go.asked == interrupt_after:  # once: a second one could reach the next test
                            _thread.interrupt_main()

                post_all(requests, answered)

            llm.post_all = counted
            return llm

        monkeypatch.setattr(command, "LLM", make)
        go.asked = 0
        return command.main(["--input", str(source), "--output", str(go.output), *flags])

    go.model_folder = model_folder
    go.output = tmp_path / "out.jsonl"
    go.partial = tmp_path / "out.jsonl.partial"
    # A shell starts its background jobs with SIGINT ignored, and then nothing here could be interrupted.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield go
    signal.signal(signal.SIGINT, before)


def test_every_form_of_line_is_answered_in_order(run):
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        batch_line("first", prompt="abc"),
        "",
        batch_line("second", CHAT, messages=messages),
        '{"prompt": "abc", "max_tokens": 5, "temperature": 0}',
        "   ",
        json.dumps({"messages": messages, "max_tokens": 5, "temperature": 0, "custom_id": "mine"}),
    ]
    assert run(lines) == 0
    records = read_records(run.output)
    assert [record["custom_id"] for record in records] == ["first", "second", "line-4", "mine"]
    assert all(record["error"] is None and record["response"]["status_code"] == 200 for record in records)
    texts = [record["response"]["body"]["choices"][0] for record in records]
    assert texts[0]["text"] == texts[2]["text"] != ""
    assert texts[1]["message"] == texts[3]["message"]
    assert records[0]["response"]["body"]["usage"]["completion_tokens"] == 5
    assert texts[0]["token_ids"] is None
    assert not run.partial.exists()


def test_responses_are_lines_as_others_are(run, capsys):
    """The limit of the output has another name there."""
    lines = [
        batch_line("chat", CHAT, messages=[{"role": "user", "content": "hi"}]),
        json.dumps({"custom_id": "r", "url": RESPONSES, "body": {"model": "m", "input": "hi", "temperature": 0}}),
        json.dumps(
            {"custom_id": "own", "url": RESPONSES, "body": {"model": "m", "input": "hi", "max_output_tokens": 3}}
        ),
        json.dumps({"custom_id": "later", "url": RESPONSES, "body": {"input": "hi", "background": True}}),
        json.dumps({"custom_id": "other", "url": RESPONSES, "body": {"messages": []}}),
        json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 2}),
    ]
    assert run(lines, "--params", '{"max_tokens": 5}') == 0
    records = read_records(run.output)
    chat, response, own, _, other, newer = (record["response"] for record in records)
    (message,) = response["body"]["output"]
    assert message["content"][0]["text"] == chat["body"]["choices"][0]["message"]["content"] != ""
    assert response["body"]["object"] == "response"
    assert [answer["body"]["usage"]["output_tokens"] for answer in (response, own)] == [5, 3]
    assert newer["body"]["usage"]["completion_tokens"] == 2
    assert other["status_code"] == 400
    assert "background" in records[3]["error"]["message"]
    errors = capsys.readouterr().err
    assert "2 of the records are errors" in errors and "15 tokens out" in errors


def test_token_ids_are_told_to_lines_that_ask_for_them(run):
    assert run([batch_line("a", prompt="abc", return_token_ids=True), batch_line("b", prompt="abc")]) == 0
    asked, plain = (record["response"]["body"]["choices"][0] for record in read_records(run.output))
    assert len(asked["token_ids"]) == 5
    assert plain["token_ids"] is None


def test_embeddings_are_lines_as_others_are(run):
    """`--params` are for what is generated."""
    lines = [
        json.dumps({"custom_id": "text", "method": "POST", "url": EMBEDDINGS, "body": {"model": "m", "input": "abc"}}),
        '{"prompt": "abc"}',
        '{"input": [[5, 6], [7]]}',
        batch_line("wrong", EMBEDDINGS, input="abc", dimensions=3),
    ]
    assert run(lines, "--params", '{"max_tokens": 3}', pooling=Pooling.MEAN) == 0
    text, generated, ids, wrong = (record["response"]["body"] for record in read_records(run.output))
    (entry,) = text["data"]
    prompt = tuple(Tokenizer.from_file(str(run.model_folder / "tokenizer.json")).encode("abc").ids)
    assert entry["embedding"] == pytest.approx(foretold(prompt, Pooling.MEAN), abs=1e-6)
    assert generated["usage"]["completion_tokens"] == 3
    found = [entry["embedding"] for entry in ids["data"]]
    assert found == [pytest.approx(foretold(prompt, Pooling.MEAN), abs=1e-6) for prompt in ((5, 6), (7,))]
    assert wrong["error"]["param"] == "dimensions"


def test_a_bad_line_becomes_an_error_record_and_no_more(run, capsys):
    lines = [
        "{not json",
        "[1, 2]",
        b'{"prompt": "\xff"}',
        json.dumps({"method": "POST", "url": COMPLETIONS, "body": {"prompt": "a"}}),
        json.dumps({"custom_id": "get", "method": "GET", "url": COMPLETIONS, "body": {"prompt": "a"}}),
        json.dumps({"custom_id": "url", "method": "POST", "url": "/v1/files", "body": {}}),
        json.dumps({"custom_id": "body", "method": "POST", "url": COMPLETIONS, "body": "x"}),
        batch_line("streamed", prompt="a", stream=True),
        "[" * 100_000,
        batch_line("\ud800", prompt="a"),
        batch_line("good", prompt="a"),
        batch_line("good", prompt="b"),
        batch_line("negative", prompt="a", max_tokens=-1),
        batch_line("typed", prompt="a", temperature="hot"),
        batch_line("other", prompt="a", model="gpt-4"),
        batch_line("long", prompt="a" * 10_000),
        batch_line("half", prompt="\ud800"),
    ]
    assert run(lines) == 0
    records = read_records(run.output)
    assert len(records) == len(lines)
    invalid = [record for record in records if record["response"] is None]
    assert [record["custom_id"] for record in invalid] == [
        None, None, None, None, "get", "url", "body", "streamed", None, None, "good",
    ]  # fmt: skip
    assert all(record["error"]["message"].startswith("line ") for record in invalid)
    statuses = {record["custom_id"]: record["response"]["status_code"] for record in records if record["response"]}
    assert statuses == {"good": 200, "negative": 400, "typed": 400, "other": 404, "long": 400, "half": 400}
    assert records[12]["response"]["body"]["error"]["param"] == "max_tokens"
    assert "16 of the records are errors" in capsys.readouterr().err


@pytest.mark.parametrize("has_output", [False, True])
def test_records_of_another_run_are_kept_and_that_run_is_named(has_output, run, capsys):
    """The other run has another input (changed, shorter or longer), or settings that change answers."""
    lines = [batch_line(f"id-{i}", prompt=f"prompt {i}") for i in range(6)]
    if has_output:
        run.output.write_text("old\n" * 60)
    assert run(lines, *(["--overwrite"] if has_output else []), interrupt_after=4) == 130
    before, output = run.partial.read_bytes(), run.output.read_bytes() if has_output else None
    changed = [batch_line("new", prompt="another"), *lines[1:]]
    for other, flags, words in [
        (changed, [], "over another input"),
        (lines[:3], [], "over another input"),
        ([*lines, batch_line("more", prompt="more")], [], "over another input"),
        (lines, ["--params", '{"top_k": 2}'], "--params {}, not {'top_k': 2}"),
        (lines, ["--dtype", "bfloat16"], "--dtype 'auto', not 'bfloat16'"),
        (lines, ["--model", "preset:llama-3.2-1b"], "--model 'demo', not 'preset:llama-3.2-1b'"),
    ]:
        assert run(other, *flags) == 2
        errors = capsys.readouterr().err
        assert f"{run.partial} holds 4 finished records of an interrupted run over" in errors and words in errors
        assert "or name another --output; --overwrite drops the records" in errors
        assert run.asked == 0
        assert run.partial.read_bytes() == before
        assert (run.output.read_bytes() if run.output.exists() else None) == output
    assert run(lines, "--max-num-seqs", "3") == 0  # changes no answer
    assert run.asked == 2
    assert len(read_records(run.output)) == 6


def test_what_lies_where_the_records_are_put_in_order_is_left_alone(run, capsys):
    ordered = run.output.with_name("out.jsonl.ordered")
    ordered.write_text("another run's output\n")
    for flags in ([], ["--overwrite"]):
        assert run([batch_line("a", prompt="a")], *flags) == 2
        assert f"{ordered} is in the way" in capsys.readouterr().err
    assert ordered.read_text() == "another run's output\n"


def test_a_finished_output_is_left_alone(run, capsys):
    lines = [batch_line("a", prompt="a")]
    run(lines)
    before = run.output.read_bytes()
    assert run(lines) == 0
    assert run.asked == 0
    assert run.output.read_bytes() == before
    assert "nothing to do" in capsys.readouterr().err
    assert run(lines, "--overwrite") == 0
    assert run.asked == 1


def test_overwriting_forgets_a_partial_output(run):
    lines = [batch_line(f"id-{i}", prompt=f"prompt {i}") for i in range(20)]
    assert run(lines, interrupt_after=7) == 130
    kept = {entry["record"]["id"] for entry in read_records(run.partial)[1:]}
    assert run(lines, "--overwrite") == 0
    assert run.asked == 20
    assert kept.isdisjoint(record["id"] for record in read_records(run.output))


def test_what_goes_wrong_at_the_start_costs_neither_old_output_nor_partial_one(run, tmp_path, monkeypatch, capsys):
    lines = [batch_line(f"id-{i}", prompt=f"prompt {i}") for i in range(20)]
    assert run(lines, interrupt_after=7) == 130
    run.output.write_text("old\n")
    before = run.partial.read_bytes()
    empty = tmp_path / "empty"
    empty.write_text("\n  \n")
    for source, words in [
        (tmp_path / "mistyped", "No such file"),
        (tmp_path, "is a folder: name a file of JSON lines"),
        (empty, "has no lines"),
        (run.output, "which this run would write: name another"),
        (run.partial, "which this run would write"),
    ]:
        assert run(source, "--overwrite") == 2
        assert words in capsys.readouterr().err
    assert run(lines, "--overwrite", "--params", "[1]") == 2

    def broken(**keywords: object) -> None:
        raise ValueError("no such model")

    monkeypatch.setattr(command, "LLM", broken)
    flags = ["--input", str(tmp_path / "in.jsonl"), "--output", str(run.output), "--overwrite"]
    assert command.main(flags) == 2
    assert "no such model" in capsys.readouterr().err
    assert run.output.read_text() == "old\n"
    assert run.partial.read_bytes() == before


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
@pytest.mark.parametrize("is_output", [True, False])
def test_an_input_that_would_be_written_is_refused_through_links_too(link, is_output, run, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    getattr(run.output if is_output else run.partial, link)(source)
    assert run(source, "--overwrite") == 2
    assert "which this run would write" in capsys.readouterr().err
    assert source.read_text() == '{"prompt": "a"}\n'


def test_an_output_behind_a_link_is_written_where_it_lies(run, tmp_path):
    (tmp_path / "far").mkdir()
    run.output.symlink_to(tmp_path / "far" / "records.jsonl")
    assert run(['{"prompt": "a"}']) == 0
    assert run.output.is_symlink()
    assert len(read_records(tmp_path / "far" / "records.jsonl")) == 1
    assert run(['{"prompt": "a"}', '{"prompt": "b"}'], "--overwrite") == 0
    assert run.output.is_symlink()
    assert len(read_records(tmp_path / "far" / "records.jsonl")) == 2


def test_an_output_that_cannot_be_a_file_is_refused(run, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    os.mkfifo(tmp_path / "fifo")
    for output, words in [
        (tmp_path, "is a folder: name a file in it"),
        ("/", "is a folder"),
        (tmp_path / "fifo", "is a device or a pipe"),
        (tmp_path / "none" / "out", f"there is no folder {tmp_path / 'none'}"),
    ]:
        for flags in ([], ["--overwrite"]):
            assert command.main(["--input", str(tmp_path / "in.jsonl"), "--output", str(output), *flags]) == 2
            assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "in.jsonl"]


def test_a_partial_file_of_another_kind_is_left_alone(run, capsys):
    for content in ("notes", "notes\n", '{"line": 1}\n', '[1]\n{"li'):
        run.partial.write_text(content)
        for flags in ([], ["--overwrite"]):
            assert run(['{"prompt": "a"}'], *flags) == 2
            assert "is in the way" in capsys.readouterr().err
            assert run.partial.read_text() == content


@pytest.mark.parametrize("how", ["fifo", "/dev/stdin", "-"])
def test_a_pipe_is_an_input_too(how, run, tmp_path):
    lines = "".join(
        batch_line(f"id-{i}", prompt=f"prompt {i}") + " " * 2000 + "\n" for i in range(50)
    )  # more than a pipe holds
    if how == "fifo":
        source = tmp_path / "fifo"
        os.mkfifo(source)
    else:
        source = Path(how)
        reading, writing = os.pipe()
    stdin = os.dup(0)

    def feed() -> None:
        with open(source if how == "fifo" else writing, "w") as pipe:
            pipe.write(lines)

    feeder = threading.Thread(target=feed)
    try:
        if how != "fifo":
            os.dup2(reading, 0)
            os.close(reading)
        feeder.start()
        assert run(source) == 0
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
        feeder.join()
    assert [record["custom_id"] for record in read_records(run.output)] == [f"id-{i}" for i in range(50)]


def test_the_standard_input_is_read_from_where_the_shell_left_it(run, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("a heading\n" + '{"prompt": "a", "custom_id": "one"}\n')
    stdin = os.dup(0)
    try:
        with source.open("rb", buffering=0) as file:
            file.seek(len("a heading\n"))
            os.dup2(file.fileno(), 0)
            assert run(Path("-")) == 0
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
    assert [record["custom_id"] for record in read_records(run.output)] == ["one"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda text: text + '{"prompt": "more"}\n', 0),
        (lambda text: text.replace("first", "other"), 2),
        (lambda text: "", 2),
    ],
)
def test_lines_added_meanwhile_do_not_count_and_changed_ones_are_an_error(change, code, run, tmp_path, monkeypatch):
    read = command.BatchInput.numbered_lines
    source = tmp_path / "in.jsonl"
    num_readings = 0

    def meanwhile(batch):
        nonlocal num_readings
        num_readings += 1
        if num_readings == 2:
            source.write_text(change(source.read_text()))
        return read(batch)

    monkeypatch.setattr(command.BatchInput, "numbered_lines", meanwhile)
    assert run(['{"prompt": "first"}', '{"prompt": "second"}']) == code
    assert num_readings == 2
    assert run.output.exists() is (code == 0)
    if code == 0:
        assert len(read_records(run.output)) == 2


def test_params_are_defaults_and_nothing_more(run):
    lines = ['{"prompt": "abc"}', '{"prompt": "abc", "max_tokens": 2}']
    assert run(lines, "--params", '{"max_tokens": 9, "temperature": 0}') == 0
    counts = [record["response"]["body"]["usage"]["completion_tokens"] for record in read_records(run.output)]
    assert counts == [9, 2]


def test_a_dying_engine_costs_only_what_was_not_finished(run, capsys):
    def stumble(number: int) -> None:
        if number == 25:
            raise RuntimeError("the device has gone")

    lines = [batch_line(f"id-{i}", prompt=f"prompt {i}") for i in range(20)]
    assert run(lines, on_result=stumble, healthy=False) == 1
    num_done = len(read_records(run.partial)) - 1
    assert 0 < num_done < 20
    assert "has died" in capsys.readouterr().err
    assert run(lines) == 0
    assert run.asked == 20 - num_done
    assert {record["response"]["status_code"] for record in read_records(run.output)} == {200}
