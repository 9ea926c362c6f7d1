"""What decides the trace of a program, and a stored trace compared with its program."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batcher.step import Bucket, Variant
from model.compiling import program as program_module
from model.compiling.program import Program, fingerprint
from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from model.network.sharding import abstract_model, make_mesh
from tests.model.collectives import collectives
from tests.model.driver import TINY, paged_attention

DEVICE = jax.devices("cpu")[0]
LIMITS = RunnerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_pages=40)


def test_the_fingerprint_is_of_code_facts_and_options(tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").write_text("x = 1\n")
    (code / "tuned.json").write_text("{}\n")

    def now(*facts: object) -> str:
        return fingerprint([code], facts, DEVICE)

    first = now("fact", 1)
    assert first == now("fact", 1)
    seen = {first, now("fact", 2)}
    jax.config.update("jax_numpy_rank_promotion", "warn")
    try:
        seen.add(now("fact", 1))
    finally:
        jax.config.update("jax_numpy_rank_promotion", "allow")
    for path, text in ((code / "a.py", "x = 2\n"), (code / "tuned.json", "[]\n"), (code / "b.py", "")):
        path.write_text(text)
        seen.add(now("fact", 1))
    (code / "__pycache__").mkdir()
    (code / "__pycache__/a.pyc").write_bytes(b"compiled")
    seen.add(now("fact", 1))
    assert len(seen) == 6


def test_the_device_itself_does_not_identify_a_trace():
    """Attached devices and their descriptions have other names, and a description of a GPU has no runtime."""

    def program(sharding: jax.sharding.Sharding) -> Program:
        x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)
        return Program(lambda x: 2 * x, (x,), donated=(), out_shardings=sharding)

    def over(device: int, *axes: str) -> jax.sharding.Sharding:
        mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[device : device + 2]), ("tensor",))
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    alone = [program(jax.sharding.SingleDeviceSharding(device)) for device in jax.devices("cpu")[:2]]
    assert repr(alone[0].traced_shapes) == repr(alone[1].traced_shapes)
    assert repr(alone[0].shapes) != repr(alone[1].shapes)
    divided = [repr(program(over(0, *axes)).traced_shapes) for axes in ((), ("tensor",))]
    assert len({*divided, repr(alone[0].traced_shapes)}) == 3
    assert repr(program(over(2, "tensor")).traced_shapes) == divided[1]


def test_the_versions_of_the_plug_in_are_in_a_gpus_fingerprint(tmp_path, monkeypatch):
    def seen(runtime: str) -> str:
        client = SimpleNamespace(platform_version=runtime)
        gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", client=client)
        return fingerprint([tmp_path], (), gpu)

    before = seen("PJRT C API\ncuda 13000")
    assert seen("PJRT C API\nNVIDIA H100 80GB HBM3") == before  # as described
    monkeypatch.setattr(program_module, "CUDA_PACKAGES", ("numpy",))
    assert seen("PJRT C API\ncuda 13000") != before


def test_a_traced_program_leaves_the_fingerprint_as_it_is(tmp_path):
    jax.config.update("jax_export_ignore_forward_compatibility", False)  # as in a new process
    before = fingerprint([tmp_path], (), DEVICE)
    x = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(DEVICE))
    Program(lambda x: 2 * x, (x,), donated=(), out_shardings=x.sharding).traced()
    assert fingerprint([tmp_path], (), DEVICE) == before


@pytest.mark.parametrize("option", ["jax_use_hlo_logistic_lowering", "jax_use_direct_linearize"])
def test_options_of_the_trace_are_in_the_fingerprint_whatever_their_names(tmp_path, option):
    value = jax.config.values[option]
    before = fingerprint([tmp_path], (), DEVICE)
    jax.config.update(option, not value)
    try:
        assert fingerprint([tmp_path], (), DEVICE) != before
    finally:
        jax.config.update(option, value)


BUCKETS = [Bucket(4, 4, Variant.GREEDY), Bucket(24, 4, Variant.SAMPLE)]


@pytest.mark.parametrize(("num_shards", "bucket"), [(None, BUCKETS[0]), (2, BUCKETS[1])])
def test_a_stored_step_compiles_to_the_same_operations(num_shards, bucket, two_passes):
    mesh = None if num_shards is None else make_mesh(num_shards)
    model = abstract_model(replace(TINY, vocab_size=200), dtype=jnp.float32, mesh=mesh)
    program = ModelRunner(model, paged_attention(model.config, mesh=mesh), LIMITS).described.step(bucket)
    traced, read = (which.lower().compile() for which in (program, program.as_read()))
    operations = [Counter(re.findall(r"= \S+ ([\w-]+)\(", compiled.as_text())) for compiled in (traced, read)]
    assert operations[0] == operations[1]
    assert collectives(traced.as_text()) == collectives(read.as_text())
    sizes = [compiled.memory_analysis() for compiled in (traced, read)]
    for name in ("temp", "alias", "output"):
        assert getattr(sizes[0], f"{name}_size_in_bytes") == getattr(sizes[1], f"{name}_size_in_bytes"), name
