"""How commands end that cannot go on: one line, an exit code, and the traceback for those who ask for it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from batcher.errors import EngineDeadError
from model.compiling.compile_cache import keep_compilations
from model.inputs.words import MAX_LINE_CHARS
from model.loading.source import DEMO_FOLDER
from scripts import convert_checkpoint, generate, launch
from scripts.building.device import compile_cache_folder
from scripts.flags.errors import failed
from scripts.flags.settings import EngineSettings
from scripts.lab import offline, plan, serving
from scripts.llm import LLM
from server.engine.protocol import EngineFailedError
from tests.conftest import COMPILED
from tests.server.support.requests import wait_until

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("--port is taken"), 2, "x: --port is taken"),
        (FileNotFoundError(2, "No such file", "f"), 2, "x: [Errno 2] No such file: 'f'"),
        (TypeError("no\n  len()"), 1, "x: internal error: TypeError: no len(); run with --debug for the traceback"),
        (RecursionError(), 1, "x: internal error: RecursionError: ; run with --debug for the traceback"),
        (EngineFailedError("no room"), 1, "x: no room"),
        (EngineFailedError("no weights", is_refusal=True).after("Sorry"), 2, "x: Sorry: no weights"),
        (EngineDeadError("gone"), 1, "x: gone"),
        (KeyboardInterrupt(), 130, "x: interrupted"),
        (ValueError("a\x1b[2Jb\ud800"), 2, "x: a\\x1b[2Jb\\ud800"),
        (ValueError(), 2, "x: ValueError"),
    ],
)
def test_an_error_is_one_line_and_a_code(error, code, line, capsys):
    assert failed("x", error, debug=False) == code
    assert capsys.readouterr().err == line + "\n"


def test_a_line_has_an_end(capsys):
    failed("x", ValueError("y" * 10**6), debug=False)
    assert len(capsys.readouterr().err) < MAX_LINE_CHARS + 10


def test_debug_prints_the_traceback_and_the_line(capsys):
    with pytest.raises(TypeError) as caught:
        len(5)
    assert failed("x", caught.value, debug=True) == 1
    shown = capsys.readouterr().err
    assert "test_errors.py" in shown and "len(5)" in shown
    assert shown.splitlines()[-1].startswith("x: internal error: TypeError: ")


SERVE = [sys.executable, "-m", "scripts.launch", *"--device cpu --port 0 --compile-cache".split(), str(COMPILED)]
SERVE += "--max-num-seqs 1 --max-num-batched-tokens 2 --max-model-len 16".split()  # few programs


def serve(*flags: object) -> subprocess.CompletedProcess[str]:
    """The serving command in a process of its own; it is to end by itself."""
    return subprocess.run(
        [*SERVE, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def broken(tmp_path) -> Path:
    """A copy of the demo, for a test to break."""
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", '{"architectures": 5}', "architectures=5 is not supported"),
        ("tokenizer_config.json", "null", "does not hold a JSON object"),
    ],
)
def test_a_bad_checkpoint_is_one_line(name, text, words, broken):
    (broken / name).write_text(text)
    result = serve("--model", broken)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith(f"scripts/serve: {broken / name}")
    assert words in result.stderr


def test_weights_that_are_a_pipe_end_the_start(broken):
    (broken / "model.safetensors").unlink()
    os.mkfifo(broken / "model.safetensors")
    result = serve("--model", broken)
    assert result.returncode == 2
    assert result.stderr == f"scripts/serve: The engine could not start: {broken / 'model.safetensors'} is not a file\n"


def test_debug_shows_the_place_of_a_failure_in_the_engines_process(broken):
    (broken / "model.safetensors").unlink()
    (broken / "orbax").mkdir()
    (broken / "orbax" / "stored.json").write_text("5")
    shown = serve("--model", broken, "--debug")
    assert shown.returncode == 2
    assert "Traceback" in shown.stderr
    assert "model/loading/orbax_format.py" in shown.stderr
    assert shown.stderr.splitlines()[-1].startswith("scripts/serve: The engine could not start: ")


DEEP = "[" * 50_000


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        (launch, ["--speculative-config", DEEP], "--speculative-config is nested too deeply; give an object such as"),
        (
            launch,
            ["--override-generation-config", '{"temperature": ' + DEEP],
            "--override-generation-config is nested too deeply",
        ),
        (generate, ["--params", DEEP], "argument --params: the JSON is nested too deeply"),
        (serving, ["--extra-body", DEEP], "argument --extra-body: the JSON is nested too deeply"),
    ],
)
def test_brackets_without_end_are_one_line(command, flags, words, capsys):
    try:
        code = command.main(flags)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("limit", [20, 63])
def test_too_few_descriptors_are_one_line(limit):
    """ZeroMQ would end the process by a signal."""
    command = [sys.executable, "-m", "scripts.launch", "--device", "cpu", "--port", "0"]
    limited = ["bash", "-c", f'ulimit -n {limit} && exec "$@"', "bash", *command]
    result = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    said = f"scripts/serve: {limit} open files are allowed, and a server needs 64: raise `ulimit -n`\n"
    assert (result.returncode, result.stderr) == (2, said)


@pytest.mark.parametrize("closed", [False, True], ids=["its reader has gone", "closed"])
def test_a_server_needs_no_standard_output(closed, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [*SERVE, "--uds", tmp_path / "socket"]
    if closed:
        command = ["bash", "-c", 'exec "$@" >&-', "bash", *command]
    server = subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    try:
        wait_until(lambda: is_ready(tmp_path / "socket") or server.poll() is not None, timeout_s=120)
        output = Path(f"/proc/{server.pid}/fd/1").resolve()
    finally:
        server.terminate()
        said = server.communicate(timeout=60)[1]
    assert server.returncode == 0, said
    assert output == Path(os.devnull)  # or a file or a socket would get the descriptor
    assert ("standard output cannot be written to ([Errno 32] Broken pipe)" in said) != closed


def is_ready(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


URL = "gs://bucket/folder"


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (launch, "--ssl-keyfile"),
        (launch, "--api-key-file"),
        (serving, "--dataset-path"),
        (offline, "--output-json"),
    ],
)
@pytest.mark.parametrize("url", [URL, "s3://b/f", "http://h/f", "file:///f"])
def test_a_url_is_no_path(url, command, flag, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main([flag, url])
    assert caught.value.code == 2
    assert f"argument {flag}: {url!r} is a URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (launch, "--tokenizer"),
        (launch, "--chat-template"),
        (generate, "--input"),
        (generate, "--output"),
        (generate, "--tokenizer"),
    ],
)
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nope://b/f", "no package of fsspec is for nope://"),
        ("s3://b/f", "s3:// needs a package that is not installed"),
        ("http://h/f", "folders cannot be listed over HTTP"),
        ("file:///f", "a file of this machine is named by its path alone"),
    ],
)
def test_a_url_that_cannot_be_reached_is_no_place(url, words, command, flag, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main([flag, url])
    assert caught.value.code == 2
    assert f"argument {flag}: {url!r}: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--model", "--compile-cache"])
@pytest.mark.parametrize("command", [launch, plan])
def test_such_a_url_is_no_model_and_no_cache(command, flag, capsys):
    assert command.main([flag, "nope://bucket/folder"]) == 2
    assert f"{flag} 'nope://bucket/folder': no package of fsspec is for nope://" in capsys.readouterr().err


def test_a_bucket_that_is_not_there_keeps_no_programs(capsys):
    assert plan.main(["--model", "memory://unmade/none"]) == 2
    assert "memory://unmade/none: there is no bucket unmade" in capsys.readouterr().err
    with pytest.raises(ValueError, match="there is no bucket unmade"):
        keep_compilations(compile_cache_folder("memory://unmade/f"))  # no other test makes it


def test_such_a_url_is_nothing_to_convert_and_no_place_to_write_to(tmp_path, capsys):
    assert convert_checkpoint.main(["nope://b/f", str(tmp_path / "out")]) == 2
    assert "model 'nope://b/f': no package of fsspec is for nope://" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convert_checkpoint.main(["demo", "nope://b/f"])
    assert "argument folder: 'nope://b/f': no package" in capsys.readouterr().err


@pytest.mark.parametrize(
    "keywords", [{"model": "nope://b/f"}, {"compile_cache": "nope://b/f"}, {"tokenizer": "nope://b/f"}]
)
def test_such_a_url_is_refused_in_python_too(keywords):
    with pytest.raises(ValueError, match="'nope://b/f': no package of fsspec is for nope://"):
        LLM(**keywords)


def test_a_url_that_was_made_a_path_is_refused():
    with pytest.raises(ValueError, match=r"tokenizer 'gs:/bucket/folder': a URL is written as gs://bucket/folder"):
        LLM(tokenizer=Path(URL))


def test_the_users_cache_folder_is_a_local_one(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", URL)
    with pytest.raises(ValueError, match="XDG_CACHE_HOME 'gs://bucket/folder' is a URL"):
        compile_cache_folder(None)


@pytest.mark.parametrize("name", ["preset:llama-3.1-8b", "org/model", "c:/models/llama", "/a:/b", "demo"])
def test_what_merely_has_a_colon_is_no_url(name):
    assert EngineSettings(model=name).model == name


def test_a_template_file_is_read_as_strictly_as_the_checkpoints(tmp_path, capsys):
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    assert launch.main(["--chat-template", str(tmp_path / "t.jinja")]) == 2
    assert f"{tmp_path / 't.jinja'} is not UTF-8 text" in capsys.readouterr().err
