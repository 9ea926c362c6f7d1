"""A second start on a CPU maps the weights that the first one has prepared, and nothing else takes their place."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from model.execution.host_copy import HOST, copied
from model.loading.given_tensors import GivenWeights
from scripts.building import device
from scripts.building.runner import Built, build_runner
from scripts.flags.settings import EngineSettings
from tests.conftest import COMPILED
from tests.model import checkpoints
from tests.model.goldens import make as make_goldens

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "num_pages": 16}


@pytest.fixture(autouse=True)
def has_eight_devices(monkeypatch):
    """A start would set their number, which this process cannot change any more."""
    monkeypatch.setattr(device, "start_jax", lambda *_, **__: "cpu")


def start(folder: Path, cache: str = str(COMPILED), **settings: object) -> tuple[Built, str | None]:
    """The runner, and whether it says that its weights are `kept` or `mapped`."""
    lines: list[str] = []
    asked = EngineSettings(model=str(folder), device="cpu", compile_cache=cache, **LIMITS, **settings)
    built = build_runner(asked, lines.append)
    (said,) = (line for line in lines if line.startswith("  load "))
    found = re.search(r"(kept) for the next start in|(mapped) from", said)
    return built, found and (found[1] or found[2])


def tensors(seed: int) -> dict[str, np.ndarray]:
    dtype = next(iter(checkpoints.tensors("tied").values())).dtype
    drawn = make_goldens.tensors(make_goldens.config("tied"), seed)
    return {name: values.astype(dtype) for name, values in drawn.items()}


def weights(built: Built) -> list[np.ndarray]:
    return [np.array(array) for array in built.runner.weights]


def are_equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, one, other))


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"attention_backend": "reference"}], ids=str)
def test_the_second_start_maps_what_the_first_has_kept(tmp_path, settings):
    folder = checkpoints.write(tmp_path, "tied")
    expected = weights(start(folder, "none", **settings)[0])
    said = []
    for _ in range(2):
        built, how = start(folder, **settings)
        said.append(how)
        assert are_equal(weights(built), expected)
    assert said == ["kept", "mapped"]


def test_other_weights_in_the_same_file_are_not_mapped(tmp_path):
    folder = checkpoints.write(tmp_path, "tied")
    first = weights(start(folder)[0])
    checkpoints.write_tensors(folder, tensors(seed=1))
    other, how = start(folder)
    assert how == "kept" and not are_equal(weights(other), first)
    assert are_equal(weights(other), weights(start(folder, "none")[0]))


def test_mapped_weights_are_updated_and_put_aside_as_others_are(tmp_path):
    folder = checkpoints.write(tmp_path, "tied")
    before = weights(start(folder)[0])
    built, how = start(folder)
    assert how == "mapped"
    copies = [copied(array, HOST) for array in built.runner.weights]
    built.runner.release()
    built.runner.restore(copies)
    assert are_equal(weights(built), before)

    built, how = start(folder)
    built.loader.update(GivenWeights(tensors(seed=1), built.plan.weights.config))
    assert not are_equal(weights(built), before)
    again, how = start(folder)
    assert how == "mapped" and are_equal(weights(again), before), "the file is as it was"


def test_weights_that_no_checkpoint_holds_and_those_of_several_devices_are_not_kept(tmp_path):
    folder = checkpoints.write(tmp_path, "tied")
    assert start(folder, load_format="dummy")[1] is None
    assert len(jax.devices()) > 1
    assert start(folder, tensor_parallel_size=2)[1] is None
