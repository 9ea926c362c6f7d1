"""Traced programs on disk: found where everything is the same, traced again where anything differs or is damaged."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from batcher.step import Bucket, Variant
from model.compiling.traced_programs import Program, TracedPrograms, fingerprint
from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from model.network.sharding import abstract_model, make_mesh
from tests.model.collectives import collectives
from tests.model.driver import TINY, Row, paged_attention, run, tiny_model

DEVICE = jax.devices("cpu")[0]
LIMITS = RunnerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_pages=40)
HERE = jax.sharding.SingleDeviceSharding(DEVICE)


def like(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=HERE)


class Counted:
    """(state, x) -> (state, y), and how often it was traced."""

    def __init__(self) -> None:
        self.num_traced = 0

    def __call__(
        self, state: dict[str, jax.Array | None], x: jax.Array
    ) -> tuple[dict[str, jax.Array | None], jax.Array]:
        self.num_traced += 1
        total = state["total"] + x
        return {"total": total, "unused": None}, total.sum()

    def program(self, size: int = 3) -> Program:
        state = {"total": like(size), "unused": None}
        return Program(self, (state, like(size)), donated=(0,), out_shardings=({"total": HERE, "unused": None}, HERE))


def test_what_was_traced_once_is_only_read_by_the_next_start(tmp_path):
    function = Counted()
    for num_found in (0, 1):
        traced = TracedPrograms(tmp_path, "f")
        compiled = traced.lower("sum", function.program()).compile()
        assert (function.num_traced, traced.num_found) == (1, num_found)
        state = {"total": jnp.ones(3), "unused": None}
        total, y = compiled(state, jnp.arange(3.0))
        assert (total["total"].tolist(), total["unused"], float(y)) == ([1, 2, 3], None, 6)
        assert state["total"].is_deleted(), "donated"


@pytest.mark.parametrize(
    "other",
    [
        lambda folder, program: TracedPrograms(folder, "g").lower("sum", program()),
        lambda folder, program: TracedPrograms(folder, "f").lower("other", program()),
        lambda folder, program: TracedPrograms(folder, "f").lower("sum", program(4)),
    ],
    ids=["fingerprint", "name", "shape"],
)
def test_anything_that_differs_makes_another_program(tmp_path, other):
    function = Counted()
    TracedPrograms(tmp_path, "f").lower("sum", function.program())
    other(tmp_path, function.program)
    assert function.num_traced == 2


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:50] + b"?" + content[51:]])
def test_a_damaged_file_is_named_and_traced_again(tmp_path, caplog, damage):
    function = Counted()
    TracedPrograms(tmp_path, "f").lower("sum", function.program())
    (path,) = tmp_path.rglob("*.stablehlo")
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        TracedPrograms(tmp_path, "f").lower("sum", function.program())
    assert f"{path} is damaged" in caplog.text
    TracedPrograms(tmp_path, "f").lower("sum", function.program())
    assert function.num_traced == 2


@pytest.mark.parametrize("goes", ["before the start", "after it"])
def test_a_folder_that_cannot_be_used_is_a_warning(tmp_path, caplog, goes):
    folder, function = tmp_path / "folder", Counted()
    if goes == "before the start":
        folder.write_text("a file")
    traced = TracedPrograms(folder, "f")
    if goes == "after it":
        shutil.rmtree(folder)
    compiled = traced.lower("sum", function.program()).compile()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be kept" in caplog.text and str(folder) in caplog.text
    assert float(compiled({"total": jnp.ones(3), "unused": None}, jnp.arange(3.0))[1]) == 6


def test_folders_that_have_not_been_used_for_long_are_deleted(tmp_path):
    for i in range(40):
        TracedPrograms(tmp_path, str(i))
        os.utime(tmp_path / str(i), (0, time.time() - 7200 + i))
    TracedPrograms(tmp_path, "new")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"new", *map(str, range(9, 40))}
    for i in range(40, 80):
        TracedPrograms(tmp_path, str(i))  # forty starts within an hour: they may still be at it
    assert {str(i) for i in range(40, 80)} <= {path.name for path in tmp_path.iterdir()}


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


def test_a_traced_program_leaves_the_fingerprint_as_it_is(tmp_path):
    jax.config.update("jax_export_ignore_forward_compatibility", False)  # as in a new process
    before = fingerprint([tmp_path], (), DEVICE)
    Counted().program().traced()
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


def test_steps_from_the_disk_are_the_steps_as_traced(tmp_path):
    texts, lines = [], []
    for folder in (None, tmp_path, tmp_path):
        runner = ModelRunner(tiny_model(), paged_attention(), LIMITS, traced_folder=folder)
        runner.warm_up(BUCKETS, lines.append)
        rows = [Row(slot, [slot + 1] * (slot + 2), [2 * slot + 1]) for slot in range(3)]
        run(runner, BUCKETS[1], [(row, len(row.prompt)) for row in rows], admit=rows)
        run(runner, BUCKETS[0], [(row, 1) for row in rows])
        texts.append([row.output for row in rows])
    assert texts[0] == texts[1] == texts[2]
    said = [re.search(r"(\d+) were traced before", line) for line in lines[::2]]
    assert [found and int(found[1]) for found in said] == [None, 0, len(BUCKETS) + 3]


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
