"""Files of K/V pages behind a real server: the texts are those of a server without tiers, whatever is done to the
server and to the files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from model.loading.source import DEMO_FOLDER
from tests.e2e.conftest import ROOT, serve_exported
from tests.e2e.kv_crowd import (
    ADMIN,
    BODIES,
    BROKEN,
    FROM_FILES,
    IN_FILES,
    NUM_PAGES,
    POOL,
    crowd,
    filled,
    flags_of,
    healthy,
    in_files,
    text_alone,
    text_of,
    texts,
    wait_for,
)
from tests.e2e.kv_faults import COUNTED, FAULTS, FaultyRun

NUM_REQUESTS = int(os.environ.get("KV_FAULTS_REQUESTS", "400"))

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def flags(engine_flags) -> list[str]:
    return flags_of(engine_flags)


@pytest.fixture(scope="module")
def told(flags) -> list[str]:
    return texts(tuple(flags))


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "pages"
    path.mkdir(mode=0o700)
    return path


def test_a_server_that_was_killed_leaves_files_that_the_next_one_serves(flags, told, folder):
    """With -9 and in the middle of writes."""
    own = [*flags, *in_files(folder)]
    with serve_exported(*own) as server, ThreadPoolExecutor(60) as pool, server.http() as http:
        asked = [pool.submit(text_of, http, body) for body in BODIES]
        wait_for(server, lambda counts: counts[IN_FILES] > 0)
        engine = server.engine_process()
        engine.kill()
        server.process.kill()
        for future in asked:
            with contextlib.suppress(httpx.HTTPError, AssertionError):  # some have ended before
                future.result(60)
        gone, _ = psutil.wait_procs([engine], 30)
        assert gone
    with serve_exported(*own) as server:
        assert crowd(server) == told
        wait_for(server, lambda counts: counts[IN_FILES] > 2 * NUM_PAGES)
        assert healthy(server)[BROKEN] == 0
    with serve_exported(*own) as server:
        assert crowd(server) == told
        assert healthy(server)[FROM_FILES] > 0


def test_files_of_other_weights_are_not_read(flags, folder, tmp_path):
    """The other model has the shapes of the demo, so the programs and the digests of pages are the same."""
    filled(folder, flags)
    model = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, model)
    tensors = load_file(model / "model.safetensors")
    tensors = {name: tensor * 1.125 if "k_proj" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    own = [*flags, "--model", str(model), "--served-model-name", "demo"]
    bodies = [body for body in BODIES if body["model"] == "demo"]
    with serve_exported(*own) as plain, plain.http(headers=ADMIN) as http:
        told = [text_alone(http, body) for body in bodies]
    with serve_exported(*own, *in_files(folder, host_pages=1000)) as server:
        assert crowd(server, bodies) == told
        assert healthy(server)[FROM_FILES] == 0


def test_no_text_is_wrong_whatever_becomes_of_servers_and_files(flags, told, folder):
    """`KV_FAULTS_REQUESTS=10000` and `-s` make it longer, and say what has happened."""
    own = [*flags, *in_files(folder, file_pages=300)]
    run = FaultyRun(told, folder, NUM_REQUESTS, of_a_server=max(100, NUM_REQUESTS // 20))
    while not run.is_done:
        with serve_exported(*own) as server:
            run.load(server)
        print(dict(sorted(run.counts.items())))
    assert not run.wrong
    assert run.counts["answers"] == NUM_REQUESTS
    assert {*FAULTS, *COUNTED, "killed", "ended"} <= run.counts.keys()
    assert run.counts[FROM_FILES] > 0 < run.counts[BROKEN]


def start_error(*flags: str) -> str:
    """The line that a server says which does not start."""
    command = [sys.executable, "-m", "scripts.launch", "--device", "cpu", "--port", "0", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (["--kv-offloading-path={folder}"], ["--kv-offloading-path", "--kv-offloading-size"]),
        (["--kv-offloading-size=60000"], ["--kv-offloading-size 60000", "GiB"]),
        (["--kv-offloading-size=1", "--kv-offloading-path={folder}/file"], ["--kv-offloading-path", "file"]),
        (
            ["--kv-offloading-size=1", "--kv-offloading-path={folder}", "--kv-offloading-disk=0.0000001"],
            ["--kv-offloading-disk"],
        ),
    ],
    ids=["no size", "too large", "a file", "less than a page"],
)
def test_flags_that_cannot_be_satisfied_are_refused_in_a_line(engine_flags, folder, own, words):
    (folder / "file").write_text("x")
    error = start_error(*engine_flags, *POOL, *(flag.format(folder=folder) for flag in own))
    assert all(word in error for word in words), error
