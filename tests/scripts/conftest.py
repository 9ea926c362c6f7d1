"""An LLM whose model is the batcher's fake runner: everything above the device is real."""

import json
import socket
from dataclasses import replace

import pytest

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.step import Capacity
from model.presets import preset
from scripts import llm as llm_module
from scripts.llm import LLM
from scripts.stand_in_tokenizer import write_stand_in_tokenizer
from server.wire import EngineInfo
from tests.batcher.fake_runner import FakeRunner

CAPACITY = Capacity(
    num_slots=4, num_pages=64, page_size=16, max_model_len=256, max_num_batched_tokens=32, vocab_size=1024
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A configuration and a stand-in tokenizer, without weights."""
    folder = tmp_path_factory.mktemp("model")
    config = replace(preset("llama-3.2-1b"), vocab_size=CAPACITY.vocab_size, bos_token_id=768, eos_token_ids=(777,))
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    write_stand_in_tokenizer(folder, CAPACITY.vocab_size)
    return folder


@pytest.fixture
def make_llm(monkeypatch, model_folder):
    """A function like LLM's constructor; `nan_token`, `healthy` and the like are the fake runner's."""

    def make(**runner_options: object) -> LLM:
        def build(settings, report):
            runner = FakeRunner(CAPACITY, **runner_options)
            ladder = BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=4))
            config = EngineConfig(eos_token_ids=(777,), max_waiting=settings.max_queue, seed=0)
            engine = Engine(runner, config, ladder)
            engine.warm_up(report)
            return engine, EngineInfo(max_model_len=CAPACITY.max_model_len, vocab_size=CAPACITY.vocab_size)

        monkeypatch.setattr(llm_module, "build", build)
        return LLM(str(model_folder), load_format="dummy", served_model_name="m")

    return make


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
