"""Models of several shapes and forms in one LLM on the CPU: each answers as it does alone, and all share the memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from model.compiling.compile_cache import keep_compilations
from model.execution.device_memory import host_memory
from scripts import convert_checkpoint, precompile
from scripts.building import limits
from scripts.building.engine_plans import Needs, divide
from scripts.building.stand_in_tokenizer import write_stand_in_tokenizer
from scripts.flags.settings import EngineSettings
from scripts.lab.demo.export import save_hf
from scripts.llm import LLM
from server.engine import wire
from tests.conftest import COMPILED
from tests.model.driver import tiny_model
from tests.scripts.precompile_one import OneStep
from tests.scripts.test_llm_training import CONFIG, model_of
from tests.scripts.test_models import LIMITS, PROMPTS, ask, has_eight_devices, send, texts  # noqa: F401, a fixture

WIDE = replace(CONFIG, hidden_size=96, intermediate_size=128, num_layers=1, vocab_size=640, max_position_embeddings=70)
NAMES = ("", "one", "wide", "wide two", "int8")
SHAPES = ("wide", "int8", "one")  # those of a start
GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("shapes")
    models = {"": model_of(0), "one": model_of(1), "wide": tiny_model(2, WIDE), "wide two": tiny_model(3, WIDE)}
    found = {name: place / (name or "own") for name in models}
    for name, folder in found.items():
        save_hf(models[name], folder, dtype=jnp.float32)
        write_stand_in_tokenizer(folder, models[name].config.vocab_size)
    found["int8"] = place / "int8"
    assert convert_checkpoint.main([str(found["one"]), str(found["int8"]), "--quantization", "int8"]) == 0
    return found


@pytest.fixture
def start(folders) -> Iterator[Any]:
    """A function that makes an LLM. It is idle and whole at the end of the test."""
    started: list[LLM] = []

    def make(models: tuple[str, ...] = (), own: str = "", **settings: Any) -> LLM:
        if models:
            settings = {"models": {name: str(folders[name]) for name in models}, "max_resident_models": 2} | settings
        settings = {"device": "cpu", "compile_cache": str(COMPILED)} | LIMITS | settings
        started.append(LLM(str(folders[own]), **settings))
        return started[-1]

    yield make
    for llm in started:
        stats = llm.stats()
        llm.close()
        assert (stats.num_compiles_after_warm_up, stats.integrity_failures, stats.num_pages_used) == (0, 0, 0)


@pytest.fixture(scope="module")
def alone(folders) -> dict[str, list[list[int]]]:
    """The tokens of each model in an LLM of its own."""
    found = {}
    for name in NAMES:
        with LLM(str(folders[name]), device="cpu", compile_cache=str(COMPILED), **LIMITS) as llm:
            found[name] = texts(llm, ("",))[""]
    assert len({str(own) for own in found.values()}) == len(NAMES)
    return found


def load(llm: LLM, name: str, folder: Path) -> wire.Reply:
    return ask(llm, wire.LoadModel(name, str(folder)))


def test_every_text_is_that_of_its_model_alone(start, folders, alone) -> None:
    lines: list[str] = []
    llm = start(SHAPES, report=lines.append)
    assert load(llm, "wide two", folders["wide two"]).error is None  # its shape is there
    assert texts(llm, NAMES) == alone
    assert texts(llm, NAMES[::-1]) == alone  # from the prefix caches
    first = next(i for i, line in enumerate(lines) if "for 3 shapes of models" in line)
    plan = lines[first : first + 4]
    assert "--memory-utilization 0.9" in plan[0]
    assert [line.split(":")[0].strip() for line in plan[1:]] == ["--model, one", "wide", "int8"]
    assert "K/V of 112 tokens" in plan[1]  # 7 pages of 16 tokens, by --num-pages
    assert all("weights 2 x " in line and line.endswith(" programs") for line in plan[1:])
    models = llm._client.models
    assert {name: (own.vocab_size, own.max_model_len) for name, own in models.items()} == {
        name: (640 if "wide" in name else 544, 64) for name in NAMES[1:]
    }
    assert llm.stats().models.keys() == {0, *(own.identity for own in models.values())}
    for name in NAMES[1:]:
        (result,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY, model=name)
        assert list(result.outputs[0].token_ids) == alone[name][0]
    guided = {"guided_choice": ["yes", "no"], "max_tokens": 4, "temperature": 0}
    assert llm.generate(["Is it?"], guided, model="wide")[0].outputs[0].text in ("yes", "no")


def test_a_shape_comes_and_goes_while_others_run(start, folders, alone) -> None:
    llm = start(("one",))
    running = send(llm, "one", PROMPTS[0], num_tokens=50)
    assert load(llm, "wide", folders["wide"]).error is None
    assert running.last.result(60).finish_reason == "length" and running.tokens[:10] == alone["one"][0]
    with pytest.raises(ValueError, match="models of another shape are on the device, too: unload them first"):
        llm.sleep(level=1)
    llm.pause("keep")
    waiting = [send(llm, name, PROMPTS[1], number=7) for name in ("", "wide")]
    llm.resume()
    assert [each.last.result(60).error for each in waiting] == [None, None]
    assert [each.tokens for each in waiting] == [alone[""][1], alone["wide"][1]]
    gc.collect()
    held = len(jax.live_arrays())
    for _ in range(2):
        assert ask(llm, wire.UnloadModel("wide")).error is None
        gc.collect()
        assert len(jax.live_arrays()) < held
        assert len(llm.stats().models) == 2
        assert load(llm, "again", folders["wide"]).error is None
        assert texts(llm, ("", "one", "again")) == {"": alone[""], "one": alone["one"], "again": alone["wide"]}
        assert ask(llm, wire.UnloadModel("again")).error is None
        assert load(llm, "wide", folders["wide"]).error is None
    assert ask(llm, wire.UnloadModel("wide")).error is None
    llm.sleep(level=1)
    llm.wake_up()
    assert texts(llm, ("one",))["one"] == alone["one"]


def test_a_start_finds_the_programs_of_each_shape_that_were_made_elsewhere(
    start, folders, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(limits, "BucketLadder", OneStep)
    models, cache = {name: str(folders[name]) for name in SHAPES}, str(tmp_path / "cache")
    said: list[str] = []
    settings = EngineSettings(model=str(folders[""]), device="cpu", models=models, compile_cache=cache, **LIMITS)
    keep_compilations(tmp_path / "cache")
    try:
        precompile.fill_all(settings, "a CPU", said.append)
        assert sum(line.startswith(f"{cache} has 4 programs and 2 of the self-test for a CPU") for line in said) == 3
        said.clear()
        start(SHAPES, compile_cache=cache, report=said.append, max_resident_models=3)
    finally:
        keep_compilations(COMPILED)
    assert sum("were made elsewhere, for a CPU" in line for line in said) == 3
    assert sum("compiled 4 programs" in line and "(4 came from the disk" in line for line in said) == 3, said


def test_what_does_not_fit_is_refused_with_the_flag_and_the_bytes(start, folders, alone) -> None:
    total = host_memory().total
    little = {"memory_utilization": (110 << 20) / total, "max_resident_models": None}  # a step takes 64 MiB and more
    words = (
        r"the models do not fit together: 0\.11 GiB are free for them \(--memory-utilization .*: weights 1 x 0\.00 GiB"
    )
    with pytest.raises(ValueError, match=f"{words}.* Lower --max-model-len"):
        start(SHAPES, **little)
    llm = start(("one",), **little)
    reply = load(llm, "wide", folders["wide"])
    assert reply.status == 400 and "the models do not fit together" in reply.error
    assert texts(llm, ("one",))["one"] == alone["one"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 2}, "excludes --tensor-parallel-size 2"),
        (
            {"kv_events_config": {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557"}},
            "--kv-events-config",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_one_shape_only_can_do_is_refused_in_words(start, settings, words) -> None:
    with pytest.raises(ValueError, match=f"--models wide=.* is a model of another shape than --model, which .*{words}"):
        start(SHAPES, **settings)


def needs(page: int, least: int, most: int, page_size: int = 16) -> Needs:
    plan: Any = None
    kv = {"page": page, "page_size": page_size, "least_kv": least * page, "most_kv": most * page}
    return Needs(plan=plan, names=["a"], one_model=1000, steps=500, **kv)


@pytest.mark.parametrize(
    ("room", "engines", "counts", "pages"),
    [
        (3000 + 400, [needs(10, 10, 10**6), needs(10, 10, 10**6)], [1, 1], [20, 20]),
        (3000 + 500, [needs(30, 5, 10**6), needs(10, 5, 10**6)], [1, 1], [12, 12]),  # as many tokens for each
        (3000 + 600, [needs(30, 5, 10**6), needs(10, 5, 7)], [1, 1], [17, 7]),  # the second has no use for more
        (4000 + 400, [needs(10, 10, 10**6), needs(10, 10, 10**6)], [2, 1], [20, 20]),
        (9000, [needs(10, 10, 12), needs(10, 10, 11)], [1, 1], [12, 11]),
        (3000 + 200, [needs(10, 10, 12), needs(10, 10, 11)], [1, 1], [10, 10]),
        (3000 + 199, [needs(10, 10, 12), needs(10, 10, 11)], [1, 1], None),
        (3000 + 999, [needs(10, 1, 12), needs(10, 1, 11)], [2, 1], None),
    ],
)
def test_the_tokens_beyond_the_least_are_as_many_for_each_shape(room, engines, counts, pages) -> None:
    found = divide(room, engines, counts)
    kept = None if found is None else [kv // own.page for kv, own in zip(found, engines, strict=True)]
    assert kept == pages
