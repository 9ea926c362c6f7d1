"""Batch files from end to end over the fake runner: formats, order, bad lines, interruption and resumption."""

import _thread
import json
import signal

import pytest

from scripts import generate as command
from scripts.batch_file import CHAT, COMPLETIONS, Journal, answer_record, digest, parse_line


def batch_line(custom_id: str, url: str = COMPLETIONS, **body: object) -> str:
    fields = {"model": "m", "max_tokens": 5, "temperature": 0} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields})


def read_records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run(make_llm, monkeypatch, tmp_path):
    """Runs the command on the given lines, in a folder of its own; `run.asked` counts the requests that were sent."""

    def go(lines: list[str | bytes], *flags: str, interrupt_after: int | None = None, **runner_options: object) -> int:
        raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
        (tmp_path / "in.jsonl").write_bytes(b"\n".join(raw) + b"\n")

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
        return command.main(["--input", str(tmp_path / "in.jsonl"), "--output", str(go.output), *flags])

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
    assert "token_ids" not in texts[0]
    assert not run.partial.exists()


def test_a_bad_line_becomes_an_error_record_and_no_more(run, capsys):
    lines = [
        "{not json",
        "[1, 2]",
        b'{"prompt": "\xff"}',
        json.dumps({"method": "POST", "url": COMPLETIONS, "body": {"prompt": "a"}}),
        json.dumps({"custom_id": "get", "method": "GET", "url": COMPLETIONS, "body": {"prompt": "a"}}),
        json.dumps({"custom_id": "url", "method": "POST", "url": "/v1/embeddings", "body": {}}),
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


def test_an_interrupted_run_is_taken_up_without_redoing_a_line(run, capsys):
    lines = [batch_line(f"id-{i}", prompt=f"prompt {i}") for i in range(20)]
    assert run(lines, interrupt_after=7) == 130
    assert not run.output.exists()
    kept = [json.loads(line) for line in run.partial.read_text().splitlines()]
    assert len(kept) == 7
    assert run(lines) == 0
    assert run.asked == 13
    records = read_records(run.output)
    assert [record["custom_id"] for record in records] == [f"id-{i}" for i in range(20)]
    ids = {record["id"] for record in records}
    assert ids.issuperset(entry["record"]["id"] for entry in kept)
    assert "goes on from" in capsys.readouterr().err


def test_a_line_that_changed_since_is_asked_again(run):
    lines = [batch_line(f"id-{i}", prompt=f"prompt {i}") for i in range(6)]
    run(lines, interrupt_after=5)
    done = {json.loads(line)["line"] for line in run.partial.read_text().splitlines()}
    changed = min(done)
    lines[changed - 1] = batch_line("new", prompt="another")
    assert run(lines) == 0
    assert run.asked == 6 - 5 + 1
    assert read_records(run.output)[changed - 1]["custom_id"] == "new"


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
    num_done = len(run.partial.read_text().splitlines())
    assert 0 < num_done < 20
    assert "has died" in capsys.readouterr().err
    assert run(lines) == 0
    assert run.asked == 20 - num_done
    assert {record["response"]["status_code"] for record in read_records(run.output)} == {200}


def test_two_runs_do_not_write_one_output(run, capsys):
    lines = [batch_line("a", prompt="a")]
    with Journal(run.partial):
        assert run(lines) == 2
    assert "another run" in capsys.readouterr().err


def test_flags_that_make_no_sense_are_refused(run, capsys):
    assert run(['{"prompt": "a"}'], "--params", "[1]") == 2
    assert "--params" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--input", "a", "--output", "b", "--beams", "3"])
    assert command.main(["--input", "no-such-file", "--output", str(run.output)]) == 2


def test_the_journal_forgets_a_torn_record(tmp_path):
    path = tmp_path / "j"
    record = answer_record(parse_line('{"prompt": "a"}', 1, {}), 200, {"id": "x"})
    with Journal(path) as journal:
        journal.add(1, "aa", record)
        journal.add(2, "bb", record)
    path.write_bytes(path.read_bytes()[:-5])
    with Journal(path) as journal:
        assert (1, "aa") in journal
        assert (2, "bb") not in journal
        journal.add(2, "cc", record)
        assert journal.write_ordered(iter([(2, "cc"), (1, "aa")]), tmp_path / "o") == 0
    assert len(read_records(tmp_path / "o")) == 2
    assert not path.exists()


def test_a_digest_knows_text_model_and_defaults_apart():
    assert len({digest("a", "m"), digest("b", "m"), digest("a", "n"), digest("\udcff", "m")}) == 4
