"""The whole path with the real engine in its process: tokens are those that the runner's contract foretells."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

from batcher.request import Request, SamplingParams
from server.text.stream import TextStream
from server.text.tokenizer import ByteLevelTokenizer
from tests.batcher.fake_runner import expected_tokens
from tests.server.support.adapters import FakeStore, write_adapter
from tests.server.support.real_engine import CAPACITY, RealConfig
from tests.server.support.requests import reading, wait_until, wait_until_idle
from tests.server.support.running import RunningServer, running_server, server_of
from tests.server.support.sse_events import parse_events
from tests.server.support.tokenizers import BOS, EOT, byte_tokenizer

TARGET = "tests.server.support.real_engine:build"
PATH = "/v1/completions"
TOKENIZER = ByteLevelTokenizer(byte_tokenizer(), config={}, chat_template=None)


server = server_of(RealConfig(), target=TARGET)


def foretold(prompt: str, *, seed: int, adapter: int = 0, **sampling) -> tuple[str, int]:
    """The text and the number of tokens that the engine must generate."""
    params = SamplingParams(**({"max_tokens": 24, "temperature": 1.0} | sampling), seed=seed)
    request = Request(request_id="", prompt=(BOS, *prompt.encode()), sampling=params, adapter=adapter)
    ids = expected_tokens(request, CAPACITY, (EOT,))
    stream = TextStream(TOKENIZER)
    return "".join([stream.push(id) for id in ids]) + stream.finish(), len(ids)


def ended(server: RunningServer) -> dict[str, float]:
    """Requests by what the engine ended them with."""
    name = "request_success_total"
    return {r: reading(server, name, f'finished_reason="{r}"') for r in ("stop", "length", "abort", "error")}


def test_bad_words_are_never_written(server):
    fields = {"allowed_token_ids": [97, 98, 99], "max_tokens": 60, "ignore_eos": True}
    with server.http() as http:
        for seed in range(4):
            body = {"prompt": "a", "seed": seed, "temperature": 1.0, "bad_words": [" ab", "cac", "bb"], **fields}
            text = http.post(PATH, json=body).json()["choices"][0]["text"]
            assert not any(word in text for word in ("ab", "cac", "bb"))
            words = ((97, 98), (99, 97, 99), (98, 98))
            assert text == foretold("a", seed=seed, bad_words=words, **fields)[0]


def test_greedy_and_sampled_texts_are_those_foretold(server):
    with server.http() as http:
        for fields in ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}):
            body = {"prompt": "hello", "max_tokens": 24, "seed": 7, **fields}
            answer = http.post(PATH, json=body).json()
            text, count = foretold("hello", seed=7, **fields)
            assert answer["choices"][0]["text"] == text
            assert answer["usage"]["completion_tokens"] == count


def test_choices_have_seeds_of_their_own(server):
    answer = server.post(PATH, {"prompt": "hello", "max_tokens": 24, "seed": 7, "n": 3}).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [foretold("hello", seed=7 + i)[0] for i in range(3)]
    assert len(set(texts)) == 3


def test_sixty_four_streams_at_once_each_get_their_own_text(server):
    prompts = [f"prompt number {i} " * (1 + i % 7) for i in range(64)]

    def stream(i: int) -> str:
        chunks = server.events(PATH, {"prompt": prompts[i], "max_tokens": 24, "seed": i})
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    with ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(stream, range(64)))
    assert texts == [foretold(prompt, seed=i)[0] for i, prompt in enumerate(prompts)]
    wait_until_idle(server)


def test_a_repeated_prompt_is_found_in_the_cache(server):
    body = {"prompt": "a prefix that is longer than one page of tokens", "max_tokens": 2, "seed": 1}
    with server.http() as http:
        cached = [
            http.post(PATH, json=body | extra).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for extra in ({}, {}, {"cache_salt": "mine"})
        ]
    assert cached == [0, 32, 0]


def test_prompt_logprobs_are_complete_in_spite_of_the_cache(server):
    with server.http() as http:
        for _ in range(2):
            body = {"prompt": "a prefix of the cache", "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1}
            logprobs = http.post(PATH, json=body).json()["choices"][0]["logprobs"]
            assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 1 + 21 + 1
            assert None not in logprobs["token_logprobs"][1:]


def test_prompt_tokens_have_their_true_ranks(server):
    """The numpy runner's rank of a prompt token is its position, and its most likely tokens are the first ids."""
    with server.http() as http:
        for num_top in (0, 2):
            body = {"prompt": "a prompt", "prompt_logprobs": num_top, "max_tokens": 1}
            first, *others = http.post(PATH, json=body).json()["choices"][0]["prompt_logprobs"]
            assert first is None
            assert [entry[str(ord(c))]["rank"] for c, entry in zip("a prompt", others, strict=True)] == [*range(1, 9)]
            assert [entry.get("1", {}).get("rank") for entry in others] == [2 if num_top else None] * 8
        assert http.post(PATH, json={"prompt": "a", "max_tokens": 1}).json()["choices"][0]["prompt_logprobs"] is None


def test_a_stop_string_frees_the_pages_and_counts_as_finished(tmp_path):
    text, _ = foretold("hello", seed=7, max_tokens=200)
    stop = text[20:23]
    # The engine is quick: without the hold it may come to 200 tokens before it hears of the stop string.
    with running_server(tmp_path, TARGET, RealConfig(held_at=60)) as server:
        with server.http() as http:
            body = {"prompt": "hello", "max_tokens": 200, "seed": 7, "stop": stop}
            choice = http.post(PATH, json=body).json()["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        wait_until(lambda: sum(ended(server).values()) == 1)
        assert ended(server) == {"stop": 1, "length": 0, "abort": 0, "error": 0}
        wait_until_idle(server)


def test_a_model_that_gives_nan_fails_its_request_alone(tmp_path):
    with running_server(tmp_path, TARGET, RealConfig(nan_token=ord("!"))) as server, server.http() as http:
        assert http.post(PATH, json={"prompt": "bad!", "seed": 1}).status_code == 500
        assert http.post(PATH, json={"prompt": "good", "seed": 1, "max_tokens": 1}).status_code == 200


def test_a_failed_step_fails_its_requests_and_the_server_goes_on(tmp_path):
    with running_server(tmp_path, TARGET, RealConfig(broken_at=2)) as server, server.http() as http:
        response = http.post(PATH, json={"prompt": "hello", "seed": 1, "stream": True, "ignore_eos": True})
        # an event where the stream had begun, a plain answer where the step failed before that
        last = parse_events(response.text)[-1] if response.status_code == 200 else response.json()
        assert last["error"]["type"] == "InternalServerError"
        assert http.post(PATH, json={"prompt": "hello", "seed": 1}).status_code == 200
        assert http.get("/health").status_code == 200


def test_a_device_that_is_gone_ends_the_server(tmp_path):
    with running_server(tmp_path, TARGET, RealConfig(broken_at=2, healthy=False)) as server, server.http() as http:
        response = http.post(PATH, json={"prompt": "hello", "seed": 1, "ignore_eos": True})
        assert response.status_code in (500, 503)
        assert "engine" in response.json()["error"]["message"]
        wait_until(lambda: http.get("/health").status_code == 503)
        assert server.process.wait(20) == 1


def test_a_device_that_is_stuck_ends_the_server_with_its_name(tmp_path):
    with running_server(tmp_path, TARGET, RealConfig(held_at=2, step_timeout_s=0.2)) as server, server.http() as http:
        response = http.post(PATH, json={"prompt": "hello", "seed": 1, "ignore_eos": True})
        assert response.status_code in (500, 503)
        assert "the device is stuck: a step has not returned for" in response.json()["error"]["message"]
        assert server.process.wait(20) == 1
    assert "the device is stuck" in server.log


def test_more_adapters_than_slots_come_and_go(tmp_path):
    """Each answer is that of the weights that its name had, whoever shares the steps and the slots."""
    folders = [write_adapter(tmp_path / name, f"weights {name}") for name in "abcde"]
    identities = {folder.name: FakeStore().load(folder) for folder in folders}
    config = RealConfig(adapters=FakeStore())
    with (
        running_server(tmp_path, TARGET, config, lora_folder=tmp_path, admin_api_keys=("boss",)) as running,
        running.http(headers={"Authorization": "Bearer boss"}, limits=httpx.Limits(max_connections=None)) as http,
        ThreadPoolExecutor(24) as threads,
    ):

        def ask(number: int) -> None:
            name = "abcde"[number % 5] if number % 6 else "test-model"
            body = {"model": name, "prompt": f"of {number % 7}", "seed": number, "temperature": 1.0, "max_tokens": 24}
            while (answer := http.post(PATH, json=body)).status_code == 404:
                pass  # its adapter has been unloaded before the engine had the request
            assert answer.status_code == 200, answer.text
            expected = foretold(f"of {number % 7}", seed=number, adapter=identities.get(name, 0))
            assert answer.json()["choices"][0]["text"] == expected[0], name
            if number % 10 == 3:  # the next request that names it loads it again
                http.post("/v1/unload_lora_adapter", json={"lora_name": name})

        list(threads.map(ask, range(200)))
        wait_until(lambda: reading(running, "lora_slot_writes_total") > 5)
        writes, written = (reading(running, f"lora_slot_{name}_total") for name in ("writes", "written_bytes"))
        assert written >= 1000 * writes
        assert reading(running, "lora_adapters_resident") == 2
        assert reading(running, "integrity_failures_total") == 0
