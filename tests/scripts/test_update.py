"""A runner whose weights a trainer has replaced is one that was loaded from a checkpoint with those weights."""

from __future__ import annotations

import gc
import os
import queue
import tracemalloc
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from model.compiling import compile_cache
from model.config import LlamaConfig
from model.loading import received_arrays
from model.loading.given_tensors import GivenWeights
from model.loading.source import DEMO, DEMO_FOLDER
from model.loading.tensor_files import TensorFiles
from model.loading.weights import load_hf
from model.network.packed import pack_for_cpu
from model.quantization.forms import MixedForms
from scripts.building import device
from scripts.building.runner import Built, build_runner
from scripts.building.runner_weights import RunnerWeights
from scripts.flags.settings import EngineSettings
from server.engine.weight_changes import WeightChanges
from server.engine.wire import (
    Array,
    ChangePhase,
    ChangeWeights,
    InFolder,
    InSharedMemory,
    Phase,
    Reply,
    UpdateStep,
    UpdateWeights,
    WeightsChange,
    WeightsSource,
)
from tests.conftest import COMPILED
from tests.model import checkpoints, gguf_files
from tests.model.given import loaded
from tests.model.goldens import make as make_goldens

pytestmark = pytest.mark.slow

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "num_pages": 16}


def other_tensors(variant: str, seed: int = 1) -> dict[str, np.ndarray]:
    """Of the variant's shapes, with other values."""
    dtype = next(iter(checkpoints.tensors(variant).values())).dtype
    drawn = make_goldens.tensors(make_goldens.config(variant), seed)
    return {name: values.astype(dtype) for name, values in drawn.items()}


def write_both(folder: Path, variant: str) -> tuple[Path, Path]:
    """Checkpoints of the variant, the second one with other weights."""
    old, new = (checkpoints.write(folder / name, variant) for name in ("old", "new"))
    checkpoints.write_tensors(new, other_tensors(variant))
    return old, new


@pytest.fixture(autouse=True)
def has_eight_devices(monkeypatch):
    """A start would set their number, which this process cannot change any more."""
    monkeypatch.setattr(device, "start_jax", lambda *_, **__: "cpu")


def built(folder: Path | str, **settings: object) -> Built:
    asked = EngineSettings(model=str(folder), device="cpu", compile_cache=str(COMPILED), **LIMITS, **settings)
    return build_runner(asked, lambda line: None)


def given(of: Built, arrays: object, **options: object) -> GivenWeights:
    return GivenWeights(arrays, of.plan.weights.config, **options)


def on_device(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.array(array) for name, array in arrays.items()}


def are_equal(one: Built, other: Built) -> bool:
    """In the weights and the scales of K/V, with their places."""
    pairs = zip(jax.tree.leaves(contents(one)), jax.tree.leaves(contents(other)), strict=True)
    return all(x.dtype == y.dtype and x.sharding == y.sharding and np.array_equal(x, y) for x, y in pairs)


def contents(of: Built) -> tuple:
    return of.runner.weights, of.runner._kv_scales


def bytes_of(arrays: object) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


def bytes_there() -> int:
    """Of all arrays of this process."""
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("gqa2", {}),
        ("tied", {}),
        ("gqa2", {"dtype": "bfloat16"}),
        ("tied", {"quantization": "int8"}),
        ("gqa2", {"kv_cache_dtype": "int8"}),
        ("gqa2", {"attention_backend": "reference"}),
        ("gqa2", {"tensor_parallel_size": 2}),
        ("tied", {"tensor_parallel_size": 4, "quantization": "int8", "kv_cache_dtype": "int8"}),
    ],
)
def test_replaced_weights_are_those_of_a_start_with_them(variant, settings, tmp_path):
    old, new = write_both(tmp_path, variant)
    updated, expected = built(old, **settings), built(new, **settings)
    assert not are_equal(updated, expected)
    pages = updated.runner.state
    for arrays in (other_tensors(variant), on_device(other_tensors(variant))):
        updated.loader.update(given(updated, checkpoints.tensors(variant)))
        assert are_equal(updated, built(old, **settings))
        updated.loader.update(given(updated, arrays))
        assert are_equal(updated, expected)
    assert updated.runner.state is pages  # the pages are where they were
    compiled = updated.runner.num_compiles
    for arrays in (checkpoints.tensors(variant), on_device(other_tensors(variant))):
        updated.loader.update(given(updated, arrays))
    assert updated.runner.num_compiles == compiled
    assert are_equal(updated, expected)


@pytest.mark.parametrize("is_donated", [False, True])
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"tensor_parallel_size": 2}])
def test_an_update_needs_room_for_one_module_more(settings, is_donated, tmp_path):
    old, _ = write_both(tmp_path, "gqa2")
    of = built(old, **settings)
    of.loader.update(given(of, on_device(other_tensors("gqa2"))))  # what is compiled keeps constants
    arrays = on_device(other_tensors("gqa2"))
    largest, given_bytes = max(array.nbytes for array in arrays.values()), bytes_of(arrays)
    gc.collect()
    before, seen = bytes_there(), []

    def replace(values: dict[str, jax.Array]) -> None:
        seen.append(bytes_there())
        place(values)

    place = of.runner.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of.runner, "replace", replace)
        of.loader.update(given(of, arrays, donate=is_donated))
    gc.collect()
    # A module and the arrays that it is made of: each of gate and up is one of the largest.
    assert max(seen) - before <= 4 * largest
    assert bytes_there() == before - (given_bytes if is_donated else 0)
    if is_donated:  # as many arrays have ended as there are new ones
        assert seen[-1] < before - given_bytes / 2


def test_a_hundred_updates_leave_nothing_behind(tmp_path):
    old, new = write_both(tmp_path, "tied")
    of, expected = built(old, kv_cache_dtype="int8"), built(new, kv_cache_dtype="int8")
    trees = [on_device(tensors) for tensors in (checkpoints.tensors("tied"), other_tensors("tied"))]
    sizes = []
    for number in range(100):
        of.loader.update(given(of, trees[number % 2]))
        if number in (1, 99):
            gc.collect()
            sizes.append((bytes_there(), len(jax.live_arrays())))
    assert sizes[0] == sizes[1]
    assert are_equal(of, expected)


def test_arrays_that_are_refused_leave_the_weights_as_they_were(tmp_path):
    old, _ = write_both(tmp_path, "gqa2")
    of, expected = built(old), built(old)
    spoilt = on_device(other_tensors("gqa2"))
    spoilt["model.layers.2.mlp.up_proj.weight"] = spoilt["model.layers.2.mlp.up_proj.weight"].at[3, 3].set(jnp.nan)
    for arrays, words in (
        (spoilt, r"model\.layers\.\{2\}\.mlp\.up_proj\.weight is not finite"),
        (dict(list(spoilt.items())[1:]), "missing: "),
        (other_tensors("mha"), "has shape"),
    ):
        for is_donated in (False, True):
            with pytest.raises(ValueError, match=words):
                of.loader.update(given(of, arrays, donate=is_donated))
    assert are_equal(of, expected)
    assert not any(array.is_deleted() for array in spoilt.values())


class RefusedUpdates:
    """Updates of a served model, whose arrays come in shared memory."""

    def __init__(self, of: Built) -> None:
        weights = RunnerWeights(of.loader)
        self._told: queue.Queue[Reply] = queue.Queue()
        self._changes = WeightChanges(SimpleNamespace(), weights)
        self._changes.listen(self._told.put)

    def ask(self, step: UpdateStep, source: WeightsSource | None = None) -> str | None:
        """Why the step is refused."""
        self._changes.ask(UpdateWeights(step, source))
        return self._told.get(timeout=120).error

    def finish(self) -> str | None:
        """Why the received weights are refused."""
        self._changes.ask(ChangePhase(Phase.PREPARE, ChangeWeights(WeightsChange.UPDATE)))
        return self._told.get(timeout=120).error

    def refused(self, tensors: dict[str, np.ndarray]) -> str:
        """What the check says of these arrays. The update is then abandoned, as by `/finish_weight_update`."""
        arrays = tuple(Array(name, x.dtype.name, x.shape) for name, x in tensors.items())
        starts, size = received_arrays.places(arrays)
        block = SharedMemory(create=True, size=size)
        try:
            for start, x in zip(starts, tensors.values(), strict=True):
                block.buf[start : start + x.nbytes] = x.tobytes()
            assert self.ask(UpdateStep.BEGIN) is None
            assert self.ask(UpdateStep.RECEIVE, InSharedMemory(block.name, arrays)) is None
        finally:
            block.close()
            block.unlink()
        said = self.finish()
        assert said is not None
        assert self.ask(UpdateStep.ABANDON) is None
        return said


def test_nothing_stays_of_a_refused_update(tmp_path):
    """Without a run of the garbage collector: of what the engine has made, the arrays alone are large, and it runs by
    the number of objects."""
    old, _ = write_both(tmp_path, "gqa2")
    updates, good = RefusedUpdates(built(old)), other_tensors("gqa2")
    norm, (first, *_) = "model.norm.weight", good
    spoilt = good | {norm: np.full_like(good[norm], np.nan)}
    wrong = {
        "not finite": spoilt, "missing: ": {name: good[name] for name in good if name != first},
        "has shape": good | {norm: good[norm][:-1]}, "unexpected: extra": good | {"extra": good[norm]},
    }  # fmt: skip
    size = bytes_of(good)
    for words, tensors in wrong.items():
        assert words in updates.refused(tensors)  # compiles the check, and fills JAX's caches
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0], bytes_there()
        for words, tensors in wrong.items():
            assert words in updates.refused(tensors)
            assert tracemalloc.get_traced_memory()[0] - before[0] < size / 4
            assert bytes_there() == before[1]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert updates.ask(UpdateStep.BEGIN) is None
    assert updates.ask(UpdateStep.RECEIVE, InFolder(str(tmp_path / "none"))) is None
    assert "there is no such folder" in (updates.finish() or "")


def test_nothing_stays_of_a_refused_reload(tmp_path, monkeypatch):
    """The new weights are complete when it is seen that their file has changed meanwhile."""
    old, new = write_both(tmp_path, "gqa2")
    of = built(old)
    weights = RunnerWeights(of.loader)
    check_unchanged, held = TensorFiles.check_unchanged, []

    def changed(files: TensorFiles) -> None:
        held.append(bytes_there())
        os.utime(new / "model.safetensors", ns=(0, len(held)))
        check_unchanged(files)

    monkeypatch.setattr(TensorFiles, "check_unchanged", changed)
    size = bytes_of(of.runner.weights)
    gc.collect()
    before = bytes_there()
    for _ in range(3):
        weights.check(ChangeWeights(WeightsChange.RELOAD, str(new)))
        gc.disable()
        try:
            with pytest.raises(ValueError, match="changed while it was read"):
                weights.prepare()
            assert bytes_there() == before
        finally:
            gc.enable()
    assert len(held) == 3 and min(held) >= size  # there were new weights each time


def test_an_array_that_ends_after_the_check_is_found_before_anything_changes(tmp_path):
    old, _ = write_both(tmp_path, "gqa2")
    of, expected = built(old), built(old)
    arrays = on_device(other_tensors("gqa2"))
    weights = given(of, arrays)
    of.loader.check(weights)
    arrays["model.norm.weight"].delete()
    with pytest.raises(ValueError, match=r"model\.norm\.weight has been deleted"):
        of.loader.update(weights)
    assert are_equal(of, expected)


def test_a_check_compiles_what_the_update_needs(tmp_path):
    """Steps go on meanwhile, and wait for the update only."""
    old, new = write_both(tmp_path, "gqa2")
    of, expected = built(old, quantization="int8"), built(new, quantization="int8")
    jax.clear_caches()
    trained = load_hf(new, of.plan.weights.config, dtype=jnp.float32)
    weights = given(of, trained, names="own", donate=True)
    unplanned, events = of.runner.num_compiles, list[str]()
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    of.loader.check(weights)
    assert (num_compiled := events.count(compile_cache.COMPILED)) > 0
    of.loader.update(weights)
    assert events.count(compile_cache.COMPILED) == num_compiled
    assert of.runner.num_compiles == unplanned
    assert are_equal(of, expected)


def test_a_check_compiles_what_each_form_of_projections_needs(tmp_path):
    """In a GGUF file a later layer may have other types than the first one."""
    folder = checkpoints.write(tmp_path / "source", "gqa2")

    def packed(key: str, rows: np.ndarray) -> tuple[np.ndarray, gguf_files.Type]:
        type = gguf_files.Type.Q8_0 if "layers.2.mlp.down" in key else gguf_files.Type.Q4_0
        return gguf.quants.quantize(np.ascontiguousarray(rows, np.float32), type), type

    config, tensors = LlamaConfig.from_file(folder), checkpoints.tensors("gqa2")
    of = built(gguf_files.write(tmp_path / "model.gguf", config, tensors, packed=packed))
    assert isinstance(of.plan.weights.quantization, MixedForms)
    jax.clear_caches()
    weights = given(of, on_device(other_tensors("gqa2")))
    of.loader.check(weights)
    compiled = of.runner.num_compiles
    of.loader.update(weights)
    assert of.runner.num_compiles == compiled
    expected = pack_for_cpu(loaded(given(of, other_tensors("gqa2")), **of.loader.plan.chips.form))
    leaves = [jax.tree.leaves(x) for x in (of.runner.weights, nnx.state(expected))]
    assert all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(*leaves, strict=True))


def test_a_fault_half_way_is_no_refusal(tmp_path, monkeypatch):
    """An engine goes on after a ValueError, as if nothing had changed."""
    old, _ = write_both(tmp_path, "gqa2")
    of, replaced = built(old), []

    def replace(values: dict[str, jax.Array]) -> None:
        if len(replaced) == 3:
            raise ValueError("a fault")
        replaced.append(place(values))

    place = of.runner.replace
    monkeypatch.setattr(of.runner, "replace", replace)
    with pytest.raises(RuntimeError, match="half way"):
        of.loader.update(given(of, other_tensors("gqa2")))


def test_a_draft_model_stays_as_it_is():
    config = {"method": "draft_model", "num_speculative_tokens": 2}
    of = built(DEMO, speculative_config=config)
    first = [np.array(array) for array in of.runner.weights]
    arrays = load_file(DEMO_FOLDER / "model.safetensors")
    number = of.runner.described.numbers["norm.scale"]
    changed = {name: array * 2 if name == "model.norm.weight" else array for name, array in arrays.items()}
    of.loader.update(given(of, changed))
    are_same = [np.array_equal(*pair) for pair in zip(of.runner.weights, first, strict=True)]
    assert are_same.count(False) == 1 and not are_same[number]
    assert len(of.runner.described.numbers) < len(first)  # the others are the draft's
