"""An LLM whose model is the batcher's fake runner: everything above the device is real."""

import json
from dataclasses import replace

import pytest

from batcher.buckets import BucketConfig, BucketLadder
from model.presets import preset
from scripts import llm as llm_module
from scripts.building.stand_in_tokenizer import write_stand_in_tokenizer
from scripts.llm import LLM
from server.engine.adapters import Adapters
from server.engine.wire import EngineInfo
from tests.scripts.generating import CAPACITY, build_fake, built_of
from tests.server.support.adapters import FakeStore
from tests.server.support.echo_engine import EchoConfig, EchoEngine


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
    """A function like LLM's constructor; `nan_token`, `healthy` and the like are the fake runner's. With a `store` of
    adapters, the engine is the one that answers with their text."""

    def make(store: FakeStore | None = None, **runner_options: object) -> LLM:
        def build(served, report, tokenizer):
            if store is None:
                return *build_fake(served.engine.max_queue, report, **runner_options), None
            engine = EchoEngine(EchoConfig(reply=(1, 2), adapters=store))
            engine.ladder = BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=4))
            info = EngineInfo(max_model_len=256, vocab_size=CAPACITY.vocab_size, max_loras=4)
            return engine, built_of(info, None), Adapters(store, engine)

        monkeypatch.setattr(llm_module, "build", build)
        return LLM(str(model_folder), load_format="dummy", served_model_name="m")

    return make
