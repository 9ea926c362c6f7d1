"""The first engine of a host compiles, and the others wait for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from scripts.building.replicas import CompileTurn


def compile_first(file: Path, steps: Connection) -> None:
    steps.recv()
    with CompileTurn(file, is_first=True).compiling():
        steps.send("compiling")
        steps.recv()


def wait_for_it(file: Path, steps: Connection) -> None:
    steps.send("waiting")
    CompileTurn(file, is_first=False).wait()
    steps.send("compiled")


def test_the_others_wait_until_the_first_has_compiled_or_has_ended(tmp_path):
    spawning = multiprocessing.get_context("spawn")
    for number, ends_well in enumerate((True, False)):
        pipes, processes = [], []
        for target in (compile_first, wait_for_it, wait_for_it):
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=target, args=(tmp_path / f"turn{number}", theirs))
            process.start()
            pipes.append(ours)
            processes.append(process)
        first, *others = pipes
        for other in others:
            assert other.recv() == "waiting"
        first.send("go")
        assert first.recv() == "compiling"
        assert not any(other.poll(0.2) for other in others)
        if ends_well:
            first.send("end")
        else:
            os.kill(processes[0].pid, signal.SIGKILL)
        assert [other.recv() for other in others] == ["compiled"] * 2
        for process in processes:
            process.join()
