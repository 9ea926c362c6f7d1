"""The product with everything in a bucket: weights, tokenizer, programs, and a batch's input and output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from model.loading.source import DEMO_FOLDER
from scripts.llm import LLM
from tests.e2e.conftest import ROOT, serve

pytestmark = [pytest.mark.e2e, pytest.mark.clients]

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "num_pages": 32}
PROMPT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def told() -> str:
    """The answer of the embedded demo."""
    with LLM(model="demo", device="cpu", compile_cache=os.environ["JAX_COMPILATION_CACHE_DIR"], **SMALL) as llm:
        return llm.generate([PROMPT["prompt"]], {"max_tokens": 12, "temperature": 0})[0].outputs[0].text


def test_all_that_is_named_may_be_in_a_bucket(store, told, tmp_path):
    store.reset("models", "results")
    url = store.upload(DEMO_FOLDER, "models", "demo")
    store.put("results", "in.jsonl", (json.dumps(PROMPT) + "\n").encode())
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    flags += ["--model", url, "--compile-cache", "gs://results/programs", "--compile-all-first"]
    homes = {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = os.environ | store.environment() | homes

    with (
        serve(
            *flags, "--tokenizer", url, "--generation-config", url, "--admin-api-key", "k", env=environment
        ) as server,
        httpx.Client(base_url=server.url, headers={"Authorization": "Bearer k"}, timeout=60) as http,
    ):
        assert http.get("/v1/models").json()["data"][0]["root"] == url
        answer = http.post("/v1/completions", json={"model": url, **PROMPT}).json()
        assert answer["choices"][0]["text"] == told
        for model, code, words in (
            (url, 200, "ok"),
            ("gs://models/none", 400, "there is no such folder or file in the bucket"),
            ("gs://nowhere/none", 400, "there is no bucket nowhere"),
        ):
            reloaded = http.post("/admin/reload", json={"model": model})
            assert reloaded.status_code == code and words in reloaded.text
        assert http.post("/start_weight_update").status_code == 200
        assert http.post("/update_weights", json={"update_info": {"path": url}}).status_code == 200
        assert http.post("/finish_weight_update", json={"weight_version": "of a bucket"}).status_code == 200
        assert http.get("/get_weight_version").json() == {"weight_version": "of a bucket"}
        assert http.post("/v1/completions", json={"model": url, **PROMPT}).json()["choices"] == answer["choices"]
    kept = store.names("results", "programs/")
    assert any(name.endswith(".xla") for name in kept) and any(name.endswith(".stablehlo") for name in kept)

    store.requests.clear()
    store.bytes_read.clear()
    command = [sys.executable, "-m", "scripts.generate", "--device", "cpu", *flags]
    batch = [*command, "--input", "gs://results/in.jsonl", "--output", "gs://results/out.jsonl"]
    done = subprocess.run(batch, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, store.buckets["results"]["out.jsonl"].content.splitlines())
    assert record["response"]["body"]["choices"][0]["text"] == told
    assert "out.jsonl.partial" not in store.names("results")
    assert sum(number for name, number in store.bytes_read.items() if name.startswith("results/programs/")) > 0
    assert store.names("results", "programs/") == kept, "the second start has compiled nothing new"
    assert not [path for method, path in store.requests if method == "POST" and "programs" in path]

    asked = len(store.requests)
    again = subprocess.run(batch, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "gs://results/out.jsonl is there already: nothing to do" in again.stderr and len(store.requests) > asked
    assert Path(tmp_path / "hf" / "pallas-serve").is_dir()


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ((401, "Anonymous caller does not have storage.objects.get access"), "no credentials for it"),
        ((403, "sa@p does not have storage.objects.get access"), "no permission"),
    ],
)
def test_a_start_that_may_not_read_says_so_in_a_line(store, tmp_path, refused, words):
    store.refuse = lambda method, bucket, name: refused
    environment = os.environ | store.environment() | {"HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "scripts.launch", "--device", "cpu", "--port", "0", "--model", "gs://models/demo"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("scripts/serve: ") and words in ended.stderr.splitlines()[-1]
