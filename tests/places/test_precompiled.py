"""Programs that are made elsewhere are kept in a bucket, where a start finds them."""

from __future__ import annotations

import pytest

from model.compiling.compile_cache import keep_compilations
from scripts import precompile
from scripts.flags.settings import EngineSettings
from tests.conftest import COMPILED
from tests.model import checkpoints
from tests.scripts.precompile_one import built, described

pytestmark = pytest.mark.clients


def test_a_start_finds_programs_in_a_bucket(store, tmp_path):
    store.reset("models", "results")
    model = str(checkpoints.write(tmp_path, "gqa2"))
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32}
    asked = EngineSettings(
        model=model, device="cpu", attention_backend="reference", compile_cache="gs://results/programs", **limits
    )
    said: list[str] = []
    try:
        precompile.fill(described(asked), "a CPU", said.append)
        kept = store.names("results", "programs/")
        assert len([name for name in kept if name.endswith(".xla")]) == 4
        precompile.fill(described(asked), "a CPU", said.append)
        assert said[-1] == "gs://results/programs has these 4 programs for a CPU already"

        started = built(asked, said)
        assert any("4 programs for" in line and "made elsewhere, for a CPU" in line for line in said)
        started.runner.warm_up(started.plan.ladder.buckets(), said.append)
        assert "(4 came from the disk" in said[-2] and "4 were traced before)" in said[-2]
    finally:
        keep_compilations(COMPILED)
