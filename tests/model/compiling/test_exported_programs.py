"""Executables on disk: they run as those that were compiled, and no file is trusted that may not be."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from batcher.step import Bucket, Variant
from model.compiling.compilation import Compilation
from model.compiling.compile_cache import CompileCounter
from model.compiling.compiler_options import compiler_options
from model.compiling.exported_programs import ExportedPrograms, executable_fingerprint
from model.compiling.program_files import check_private
from model.compiling.traced_programs import Program
from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from tests.model.driver import TINY, Row, paged_attention, run, tiny_model

pytestmark = pytest.mark.slow

DEVICE = jax.devices("cpu")[0]
HERE = jax.sharding.SingleDeviceSharding(DEVICE)
LIMITS = RunnerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_pages=40)
BUCKETS = [Bucket(4, 4, Variant.GREEDY), Bucket(24, 4, Variant.GREEDY)]


def double() -> Program:
    x = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=HERE)
    return Program(lambda state, x: (state + x, 2 * x), (x, x), donated=(0,), out_shardings=(HERE, HERE))


class Start:
    """One start of a program that is the sum and the double of its arguments."""

    def __init__(self, folder: Path, fingerprint: str = "f", name: str = "double", of_machine: str = "m") -> None:
        program = double()
        self.num_traced = 0
        counter = CompileCounter()

        def lower() -> jax.stages.Lowered:
            self.num_traced += 1
            return program.lower()

        exported = ExportedPrograms(folder, fingerprint, {"k": program}, {"k": name}, of_machine=of_machine)
        executable = Compilation({"k": lower}, {}, counter, exported).result()["k"]
        self.num_compiled = counter.total
        state = jnp.ones(3)
        total, twice = executable(state, jnp.arange(3.0))
        assert (total.tolist(), twice.tolist()) == ([1, 2, 3], [0, 2, 4])
        assert state.is_deleted(), "donated"


def test_a_second_start_traces_nothing(tmp_path):
    assert [Start(tmp_path / "new" / "folder").num_traced for _ in range(3)] == [1, 0, 0]
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("other", [{"fingerprint": "g"}, {"name": "other"}], ids=["fingerprint", "name"])
def test_what_differs_is_traced_and_compiled_only_if_the_program_differs(tmp_path, other):
    Start(tmp_path)
    for expected in ((1, 0), (0, 0)):
        again = Start(tmp_path, **other)
        assert (again.num_traced, again.num_compiled) == expected
    elsewhere = Start(tmp_path, **other | {"fingerprint": "h", "of_machine": "n"})
    assert (elsewhere.num_traced, elsewhere.num_compiled) == (1, 1)


def test_executables_that_no_code_traces_any_more_are_deleted(tmp_path):
    Start(tmp_path)
    (kept,) = (tmp_path / "m").iterdir()
    (found,) = (tmp_path / "f").iterdir()
    assert kept.samefile(found)
    for age_s, is_left in ((7200, True), (0, True), (7200, False)):
        os.utime(kept, times=(0, time.time() - age_s))
        Start(tmp_path, name="other", of_machine="m2")
        ExportedPrograms(tmp_path, "f", {}, {}, of_machine="m")
        assert kept.exists() == is_left
        found.unlink(missing_ok=True)


def cut(content: bytes) -> bytes:
    return content[:-1]


def other_executable(content: bytes) -> bytes:
    """With a checksum that is right."""
    return sha256(b"no pickle").digest() + b"no pickle"


@pytest.mark.parametrize(("damage", "said"), [(cut, "is damaged"), (other_executable, "cannot be used")])
def test_a_damaged_file_is_named_and_made_again(tmp_path, caplog, damage: Callable[[bytes], bytes], said):
    Start(tmp_path)
    (path,) = (tmp_path / "f").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert Start(tmp_path).num_traced == 1
    assert {record.levelname for record in caplog.records} == {"WARNING"}  # of both names of the file
    assert f"{path} {said}" in caplog.text and "made again" in caplog.text
    assert Start(tmp_path).num_traced == 0


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(ValueError, match="--export-cache: other users may write to") as error:
        Start(tmp_path)
    assert f"{tmp_path}" in str(error.value) and "chmod 700" in str(error.value)


def test_a_file_that_others_can_write_to_is_made_again(tmp_path, caplog):
    Start(tmp_path)
    (path,) = (tmp_path / "f").iterdir()
    path.chmod(0o666)
    assert Start(tmp_path).num_traced == 1
    assert f"other users may write to {path}" in caplog.text
    assert path.stat().st_mode & 0o022 == 0


def test_a_folder_of_another_user_is_refused(tmp_path):
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, 12345)
    foreign = tmp_path if os.geteuid() == 0 else Path("/usr")
    with pytest.raises(ValueError, match=f"--export-cache: {foreign} belongs to another user"):
        check_private(foreign, "--export-cache")


def test_the_fingerprint_is_of_code_facts_options_and_devices(tmp_path):
    (tmp_path / "code.py").write_text("x = 1\n")
    options = compiler_options("cpu")

    def now(facts=("fact",), options=options) -> str:
        return executable_fingerprint([tmp_path], facts, DEVICE, options)

    assert now() == now()
    seen = {now(), now(facts=("another",)), now(options={**options, "xla_cpu_enable_fast_math": False})}
    (tmp_path / "code.py").write_text("x = 2\n")
    assert len(seen | {now()}) == 4


def made_runner(folder: Path | None) -> ModelRunner:
    model = tiny_model(config=replace(TINY, num_layers=1))
    return ModelRunner(model, paged_attention(), LIMITS, export_folder=folder)


def start(folder: Path | None, may_wait: Sequence[Bucket] = ()) -> tuple[list[list[int]], str]:
    """The tokens of a few steps, and what the start has said."""
    lines: list[str] = []
    runner = made_runner(folder)
    before = runner.num_compiles
    left = runner.warm_up(BUCKETS, lines.append, may_wait)
    tokens = generate(runner, left)
    return tokens, f"{runner.num_compiles - before} compiled; {'; '.join(lines)}"


def generate(runner: ModelRunner, left: Sequence[Bucket] = ()) -> list[list[int]]:
    """The tokens of a few steps. Programs that are `left` come before the decodes."""
    rows = [Row(slot, [slot + 1] * (slot + 2), [2 * slot + 1]) for slot in range(3)]
    run(runner, BUCKETS[1], [(row, len(row.prompt)) for row in rows], admit=rows)
    for bucket in left:
        runner.compile_later(bucket, print)
    for _ in range(2):
        run(runner, BUCKETS[0], [(row, 1) for row in rows])
    return [row.output for row in rows]


def test_steps_from_the_disk_are_the_steps_as_compiled(tmp_path):
    tokens, said = zip(*(start(folder) for folder in (None, tmp_path, tmp_path)), strict=True)
    assert tokens[0] == tokens[1] == tokens[2]
    assert "compiled 5 programs" in said[1] and "exported before" not in said[1]
    assert re.match("0 compiled; compiled 0 programs .* 5 more were exported before.*; ran 2 of 2", said[2]), said[2]


def test_programs_that_may_wait_are_exported_and_loaded_while_serving(tmp_path):
    """They run on padding before their first step: it must not touch what the running requests have."""
    tokens, said = zip(*(start(folder, BUCKETS[:1]) for folder in (None, tmp_path, tmp_path)), strict=True)
    assert tokens[0] == tokens[1] == tokens[2] == start(tmp_path)[0]
    assert "4 compiled; compiled 4 programs" in said[1] and "1 more come while serving" in said[1]
    assert re.match("0 compiled; compiled 0 programs .* 4 more were exported before.*; ran 1 of 1", said[2]), said[2]
    assert "5 more were exported before" in start(tmp_path)[1]


def break_program(folder: Path) -> None:
    """On a CPU, an executable that came from JAX's cache is exported without a part of its code, and loads."""
    program = made_runner(None).described.step(BUCKETS[0])
    fingerprints = [(one.name, other.name) for one in folder.iterdir() for other in folder.iterdir() if one != other]
    (exported,) = (
        found
        for own, of_machine in fingerprints
        if (found := ExportedPrograms(folder, own, {"k": program}, {"k": str(BUCKETS[0])}, of_machine=of_machine))
        and found._path("k").exists()
    )
    options, counter = compiler_options("cpu"), CompileCounter()
    while not counter.from_cache_in_this_thread:
        lowered = program.lower()
        executable = lowered.compile(compiler_options=options)
    exported.store("k", executable, lowered)


def test_a_program_that_fails_at_its_first_run_is_compiled(tmp_path):
    start(tmp_path)
    break_program(tmp_path)
    tokens, said = start(tmp_path)
    assert "an exported program fails, and all are compiled" in said
    assert tokens == start(None)[0]
    assert "compiled 0 programs" in start(tmp_path)[1]


def test_a_program_that_fails_while_serving_fails_one_step_and_is_compiled(tmp_path, caplog):
    tokens, _ = start(tmp_path)
    break_program(tmp_path)
    runner = made_runner(tmp_path)
    (left,) = runner.warm_up(BUCKETS, print, BUCKETS[:1])
    runner.compile_later(left, print)
    with pytest.raises(jax.errors.JaxRuntimeError):
        runner.execute(runner.described.padding(left))
    assert f"an exported program fails, and is compiled: {left}" in caplog.text
    runner.recover()
    assert generate(runner) == tokens
    caplog.clear()
    assert start(tmp_path, BUCKETS[:1])[0] == tokens
    assert not caplog.text
