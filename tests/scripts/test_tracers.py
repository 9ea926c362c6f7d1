"""Processes that trace an engine's programs ahead of it: real ones, on a CPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from model.compiling.program_store import ProgramStore
from scripts.building import runner as building
from scripts.building.load import Loader
from scripts.building.runner import build_runner, warm_engine
from scripts.building.tracers import GIB, num_tracers, start_tracers, trace_ahead
from scripts.flags.settings import EngineSettings
from tests.model import checkpoints

pytestmark = pytest.mark.slow


def say_nothing(line: str) -> None:
    pass


def refuse(settings: EngineSettings) -> Any:
    raise ValueError("no second process can use the device")


BUILD = partial(build_runner, report=say_nothing, only_programs=True)


@pytest.fixture
def settings(tmp_path) -> EngineSettings:
    folder = checkpoints.write(tmp_path / "model", "gqa2")
    (tmp_path / "cache").mkdir(mode=0o700)
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 2, "max_model_len": 32, "num_pages": 8}
    return EngineSettings(
        model=str(folder), device="cpu", attention_backend="reference", compile_cache=str(tmp_path / "cache"), **limits
    )


def test_an_engine_reads_what_other_processes_have_traced(settings):
    first = BUILD(settings)
    buckets = first.plan.ladder.buckets()
    for process in start_tracers(settings, buckets, 2, BUILD):
        process.join(120)
        assert process.exitcode == 0
    lines: list[str] = []
    built = build_runner(replace(settings, compile_all_first=True), lines.append, compile_meanwhile=True)
    warm_engine(built, lines.append)
    (account,) = (line for line in lines if line.startswith("  compiled "))
    assert f"{len(buckets)} were traced before" in account


def test_a_process_that_fails_is_a_warning(settings, capfd):
    (process,) = start_tracers(settings, BUILD(settings).plan.ladder.buckets(), 1, refuse)
    process.join(120)
    assert process.exitcode == 0
    said = capfd.readouterr().err
    assert "a process that traces programs has ended, and the engine traces them: " in said
    assert "no second process can use the device" in said
    assert "Traceback" not in said


def test_a_cpu_has_no_such_processes(settings, monkeypatch):
    monkeypatch.setattr("scripts.building.tracers.start_tracers", lambda *_: pytest.fail("started"))
    built = BUILD(settings)
    trace_ahead(built.runner, settings, built.plan.ladder.buckets(), "cpu", BUILD)


@pytest.mark.parametrize(
    ("platform", "cores", "pool_gib", "num_programs", "expected"),
    [
        ("gpu", 16, 72.8, 29, 4),  # an H100
        ("gpu", 64, 72.8, 29, 4),
        ("gpu", 8, 72.8, 29, 2),
        ("gpu", 2, 72.8, 29, 0),
        ("gpu", 16, 36.5, 29, 0),  # 40 GiB: the engine needs what its pool leaves
        ("gpu", 16, 20.5, 29, 0),  # an L4
        ("gpu", 16, 72.8, 5, 0),  # the rest was traced by an earlier start
        ("tpu", 44, 30.0, 16, 4),
        ("cpu", 44, 30.0, 28, 0),
    ],
)
def test_there_are_as_many_as_have_room_and_are_worth_their_start(platform, cores, pool_gib, num_programs, expected):
    found = num_tracers(platform, cores=cores, pool_bytes=int(pool_gib * GIB), num_programs=num_programs)
    assert found == expected


def test_a_pool_that_leaves_little_leaves_room_for_none():
    assert num_tracers("gpu", cores=16, pool_bytes=int(77.5 * GIB), num_programs=29, pool_share=0.98) == 0


def test_a_gpus_kept_programs_are_loaded_while_the_weights_load(settings, monkeypatch):
    """Nothing is compiled on a GPU before the weights are there, but nothing waits for them that is only read."""
    start = partial(build_runner, replace(settings, compile_all_first=True), compile_meanwhile=True)
    warm_engine(start(report=say_nothing), say_nothing)
    num_kept = len(list((Path(settings.compile_cache) / "executables").rglob("*.exe")))
    as_started = building._start_compiling
    monkeypatch.setattr(building, "_start_compiling", lambda *of, **_: as_started(*of, only_trace=True))
    read, read_weights, found, all_found = ProgramStore.load, Loader.read, [], threading.Event()

    def counted(*of: Any) -> Any:
        program = read(*of)
        found.append(program is not None)
        if sum(found) == num_kept:
            all_found.set()
        return program

    def after_programs(*of: Any, **how: Any) -> Any:
        assert all_found.wait(60), "the programs wait for the weights"
        return read_weights(*of, **how)

    monkeypatch.setattr(ProgramStore, "load", counted)
    monkeypatch.setattr(Loader, "read", after_programs)
    lines: list[str] = []
    warm_engine(start(report=lines.append), lines.append)
    assert len(found) == num_kept > 5
    assert any(line.startswith("  compiled 0 programs") for line in lines)
