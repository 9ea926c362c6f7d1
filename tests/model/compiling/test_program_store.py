"""A program that is loaded at any stage gives the results of a compiled one. Files that others could have written are
not loaded."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache as jax_cache

from batcher.step import Bucket, Variant
from model.compiling import kept_files
from model.compiling.compilation import Compilation
from model.compiling.compile_cache import Made, compile_lowered, keep_compilations
from model.compiling.compiler_options import compiler_options
from model.compiling.kept_files import KeptFiles
from model.compiling.program import Program
from model.compiling.program_store import ProgramStore, executable_fingerprint
from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from tests.conftest import COMPILED
from tests.model.driver import TINY, Row, paged_attention, run, tiny_model

pytestmark = pytest.mark.slow

HERE = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
LIMITS = RunnerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_pages=40)
BUCKETS = [Bucket(4, 4, Variant.GREEDY), Bucket(24, 4, Variant.GREEDY)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of the process's compiled programs until the test ends."""
    folder = tmp_path / "new" / "folder"
    keep_compilations(folder)
    yield folder
    keep_compilations(COMPILED)


class Start:
    """One start with a program that returns the sum and the double of its arguments."""

    def __init__(
        self, folder: Path, traced_from: str = "t", compiled_from: str | None = "c", *, name: str = "sum", size: int = 3
    ) -> None:
        self.num_traced = 0
        self.made: list[Made] = []
        program = self._program(size)
        store = ProgramStore(folder, traced_from, compiled_from)

        def keep(key: str, made: Made) -> None:
            self.made.append(made)
            store.keep(name, program, made)

        compilation = Compilation(
            {"k": lambda: store.lower(name, program)}, {}, load=lambda key: store.load(name, program), keep=keep
        )
        executable = compilation.result()["k"]
        state = {"total": jnp.ones(size), "unused": None}
        total, twice = executable(state, jnp.arange(float(size)))
        assert (total["total"][:3].tolist(), total["unused"], twice[:3].tolist()) == ([1, 2, 3], None, [0, 2, 4])
        assert state["total"].is_deleted(), "donated"

    def _program(self, size: int) -> Program:
        x = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=HERE)
        shardings = ({"total": HERE, "unused": None}, HERE)
        return Program(self._trace, ({"total": x, "unused": None}, x), donated=(0,), out_shardings=shardings)

    def _trace(self, state: dict[str, jax.Array | None], x: jax.Array) -> tuple[dict[str, jax.Array | None], jax.Array]:
        self.num_traced += 1
        return {"total": state["total"] + x, "unused": None}, 2 * x

    @property
    def stages(self) -> tuple[int, int, int]:
        """The number of programs that were traced, lowered and compiled."""
        return self.num_traced, len(self.made), sum(not made.is_from_disk for made in self.made)


MADE, LOADED = (1, 1, 1), (0, 0, 0)


def test_a_second_start_neither_traces_nor_lowers(folder):
    assert [Start(folder).stages for _ in range(3)] == [MADE, LOADED, LOADED]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o600}


@pytest.mark.parametrize(
    ("other", "stages"),
    [
        ({"traced_from": "t2", "compiled_from": "c2"}, (1, 1, 0)),  # the same program by other code
        ({"name": "other"}, (1, 1, 0)),
        ({"size": 4}, MADE),
        ({"compiled_from": "c2"}, (0, 1, 0)),
        ({"compiled_from": None}, (0, 1, 0)),
    ],
    ids=str,
)
def test_what_differs_is_made_from_the_stage_at_which_it_differs(folder, other, stages):
    Start(folder)
    assert Start(folder, **other).stages == stages
    assert Start(folder, **other).stages == (LOADED if other.get("compiled_from", "c") else (0, 1, 0))


def files(folder: Path) -> dict[str, Path]:
    """The files of the program's stages."""
    (executable,) = folder.rglob("*.exe")
    key = executable.read_bytes()[sha256().digest_size :].partition(b"\n")[0].decode()
    (traced,) = folder.rglob("*.stablehlo")
    return {".exe": executable, ".xla": folder / "xla" / f"{key}.xla", ".stablehlo": traced}


def cut(content: bytes) -> bytes:
    return content[:-1]


def changed(content: bytes) -> bytes:
    return content[:50] + bytes([content[50] ^ 1]) + content[51:]


def no_pickle(content: bytes) -> bytes:
    """With the right checksum and key."""
    key, _, _ = content[sha256().digest_size :].partition(b"\n")
    return sha256(key + b"\nno pickle").digest() + key + b"\nno pickle"


@pytest.mark.parametrize(
    ("suffix", "damage", "said", "stages"),
    [
        (".stablehlo", cut, "is damaged", (1, 1, 0)),
        (".stablehlo", changed, "is damaged", (1, 1, 0)),
        (".exe", changed, "is damaged", (0, 1, 0)),
        (".exe", no_pickle, "cannot be used", (0, 1, 0)),
        (".xla", lambda content: b"", "is damaged", (0, 1, 1)),
        (".xla", cut, "is damaged", (0, 1, 1)),
    ],
)
def test_a_damaged_file_is_named_and_made_again(folder, caplog, suffix, damage: Callable[[bytes], bytes], said, stages):
    Start(folder)
    path = files(folder)[suffix]
    path.write_bytes(damage(path.read_bytes()))
    compiled_from = "c" if suffix != ".stablehlo" else "c2"  # an executable that is there needs no trace
    with caplog.at_level(logging.WARNING):
        assert Start(folder, compiled_from=compiled_from).stages == stages
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert f"{path} {said}" in caplog.text and "made again" in caplog.text
    assert Start(folder, compiled_from=compiled_from).stages == LOADED


@pytest.mark.parametrize(("suffix", "stages"), [(".exe", (0, 1, 0)), (".xla", (0, 1, 1))])
def test_a_file_that_others_can_write_to_is_made_again(folder, caplog, suffix, stages):
    Start(folder)
    path = files(folder)[suffix]
    path.chmod(0o666)
    assert Start(folder).stages == stages
    assert f"other users may write to {path}" in caplog.text
    assert path.stat().st_mode & 0o022 == 0


def test_a_user_whose_files_his_group_can_write_to_keeps_programs(folder):
    before = os.umask(0o002)
    try:
        assert [Start(folder).stages for _ in range(2)] == [MADE, LOADED]
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, mode):
    """A compiled program runs as code."""
    tmp_path.chmod(mode)
    for use in (keep_compilations, KeptFiles):
        with pytest.raises(ValueError, match="--compile-cache: other users may write to") as error:
            use(tmp_path)
        assert f"{tmp_path}" in str(error.value) and "chmod 700" in str(error.value)


def test_a_folder_of_another_user_is_refused(tmp_path):
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, 12345)
    foreign = tmp_path if os.geteuid() == 0 else Path("/usr")
    with pytest.raises(ValueError, match=f"--compile-cache: {foreign} belongs to another user"):
        KeptFiles(foreign)


def test_a_folder_that_cannot_be_used_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert [Start(tmp_path / "file").num_traced for _ in range(2)] == [1, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2, "one each"
    assert "programs cannot be kept" in caplog.text and str(tmp_path / "file") in caplog.text


def test_the_least_recently_used_files_are_deleted(tmp_path, monkeypatch):
    def start(name: str) -> None:
        KeptFiles(tmp_path).write(name, b"x" * 1000)

    old = [f"{suffix[1:]}/{number}{suffix}" for number in range(5) for suffix in kept_files.SUFFIXES]
    for number, name in enumerate(old):
        start(name)
        os.utime(tmp_path / name, (0, time.time() - 7200 + number))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/model.weights").write_bytes(b"x" * 20_000)
    assert KeptFiles(tmp_path).read(old[3]) is not None  # in use again
    monkeypatch.setattr(kept_files, "_MAX_BYTES", 10 * (32 + 1000))
    start("new.exe")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"weights/model.weights", "new.exe", old[3], *old[-8:]}
    for number in range(20):
        start(f"{number}.exe")  # within an hour: other starts may be using them
    assert all((tmp_path / f"{number}.exe").exists() for number in range(20))


def test_the_fingerprint_of_executables_is_of_the_trace_options_and_environment(monkeypatch):
    options = compiler_options("cpu")
    seen = [executable_fingerprint("t", options) for _ in range(2)]
    seen.append(executable_fingerprint("t2", options))
    seen.append(executable_fingerprint("t", {**options, "xla_cpu_enable_fast_math": False}))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=32768")
    seen.append(executable_fingerprint("t", options))
    assert seen[0] == seen[1] and len(set(seen)) == 4


def made_runner(folder: Path | None, **options: bool) -> ModelRunner:
    model = tiny_model(config=replace(TINY, num_layers=1))
    return ModelRunner(model, paged_attention(), LIMITS, program_folder=folder, **options)


def start(folder: Path | None, may_wait: Sequence[Bucket] = (), **options: bool) -> tuple[list[list[int]], str]:
    """The tokens of a few steps, and what the start has said."""
    lines: list[str] = []
    runner = made_runner(folder, **options)
    before = runner.num_compiles
    left = runner.warm_up(BUCKETS, lines.append, may_wait)
    tokens = generate(runner, left)
    return tokens, f"{runner.num_compiles - before} compiled; {'; '.join(lines)}"


def generate(runner: ModelRunner, left: Sequence[Bucket] = ()) -> list[list[int]]:
    """The tokens of a few steps. Programs that are `left` come before the decodes."""
    rows = [Row(slot, [slot + 1] * (slot + 2), [2 * slot + 1]) for slot in range(3)]
    run(runner, BUCKETS[1], [(row, len(row.prompt)) for row in rows], admit=rows)
    for bucket in left:
        runner.compile_later(bucket)
    for _ in range(2):
        run(runner, BUCKETS[0], [(row, 1) for row in rows])
    return [row.output for row in rows]


def test_steps_from_the_disk_are_the_steps_as_compiled(folder):
    tokens, said = zip(*(start(one) for one in (None, folder, folder)), strict=True)
    traced = start(folder, keeps_executables=False)
    assert tokens[0] == tokens[1] == tokens[2] == traced[0]
    assert "compiled 5 programs" in said[1] and "0 were traced before" in said[1] and "exported before" not in said[1]
    assert re.match("0 compiled; compiled 0 programs .* 5 more were exported before.*; ran 2 of 2", said[2]), said[2]
    assert re.search(r"compiled 5 programs .*\(5 came from the disk.*, 5 were traced before\)", traced[1]), traced[1]


def test_programs_that_may_wait_are_kept_and_loaded_while_serving(folder):
    """They run on padding before their first step: it must not touch what the running requests have."""
    tokens, said = zip(*(start(one, BUCKETS[:1]) for one in (None, folder, folder)), strict=True)
    assert tokens[0] == tokens[1] == tokens[2] == start(folder)[0]
    assert "4 compiled; compiled 4 programs" in said[1] and "1 more come while serving" in said[1]
    assert re.match("0 compiled; compiled 0 programs .* 4 more were exported before.*; ran 1 of 1", said[2]), said[2]
    assert "5 more were exported before" in start(folder)[1]


def break_program(folder: Path) -> None:
    """On a CPU, an executable that came from JAX's cache is serialised without a part of its code, and loads."""
    runner = made_runner(folder)
    name, program = runner.described.name(BUCKETS[0]), runner.described.step(BUCKETS[0])
    made = compile_lowered(runner.programs._store.lower(name, program), compiler_options("cpu"))
    assert made.is_from_disk
    executable = made.executable.runtime_executable()
    jax_cache.put_executable_and_time(made.key, name, executable, jax.devices()[0].client, 1)


def test_a_program_that_fails_at_its_first_run_is_compiled(folder):
    start(folder)
    break_program(folder)
    tokens, said = start(folder)
    assert "a program from the disk fails, and all are compiled" in said
    assert tokens == start(None)[0]
    assert "compiled 0 programs" in start(folder)[1]


def test_a_program_that_fails_while_serving_fails_one_step_and_is_compiled(folder, caplog):
    tokens, _ = start(folder)
    break_program(folder)
    runner = made_runner(folder)
    (left,) = runner.warm_up(BUCKETS, print, BUCKETS[:1])
    runner.compile_later(left)
    with pytest.raises(jax.errors.JaxRuntimeError):
        runner.execute(runner.described.padding(left))
    assert f"a program from the disk fails, and is compiled: {left}" in caplog.text
    runner.recover()
    assert generate(runner) == tokens
    caplog.clear()
    assert start(folder, BUCKETS[:1])[0] == tokens
    assert not caplog.text
